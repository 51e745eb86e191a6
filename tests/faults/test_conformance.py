"""Every transport keeps its promises when messages are late and overtake each other; no damage passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import BETWEEN_PROCESSES, SCHEMES, fresh_url

from ruda_async.errors import CommunicatorClosedError, PeerLostError
from ruda_async.transport.conformance import SCENARIOS, run_scenario


@pytest.mark.parametrize("name", sorted(SCENARIOS))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_late_and_out_of_order(scheme: str, name: str) -> None:
    run_scenario(name, f"faults+{fresh_url(scheme)}?delay_ms=1&jitter_ms=3&reorder=true&seed=7")


@pytest.mark.parametrize(
    "name", ["order_within_a_tag", "cancelled_sends", "aborted_peer", "everyone_to_everyone"]
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_slow_and_on_one_rank_alone(scheme: str, name: str) -> None:
    run_scenario(name, f"faults+{fresh_url(scheme)}?bandwidth=200M&only_rank=1", ranks="threads")


@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
def test_between_processes(scheme: str) -> None:
    run_scenario("sizes", f"faults+{fresh_url(scheme)}?jitter_ms=2&duplicate=true", ranks="processes")


@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_checksums_change_nothing(scheme: str, name: str) -> None:
    run_scenario(name, f"{fresh_url(scheme)}?checksum=true")


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def end_of(name: str, url: str) -> list[BaseException]:
    """How the ranks of a scenario failed; nothing where it passed."""
    try:
        run_scenario(name, url)
    except BaseException as error:
        return list(leaves(error))
    return []


@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
@pytest.mark.parametrize("name", ["sizes", "order_within_a_tag", "reversed_tags", "everyone_to_everyone"])
@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_bytes_end_in_an_error_and_never_in_wrong_data(scheme: str, name: str, seed: int) -> None:
    """These scenarios compare every byte, so wrong data would be an `AssertionError`."""
    url = f"faults+{fresh_url(scheme)}?checksum=true&corrupt_rate=1e-4&seed={seed}"
    errors = end_of(name, url)
    assert errors
    for error in errors:
        assert isinstance(error, PeerLostError | CommunicatorClosedError), error
    assert any("broke the protocol" in str(error) for error in errors)


@pytest.mark.parametrize("at", [*range(0, 36, 3), 40, 68, 69, 75, 130, 150, 200, 5000, 300_000, 8_000_000])
def test_one_damaged_byte_anywhere(at: int) -> None:
    """In prefixes, heads, small payloads, parts of large ones and what steers them."""
    url = f"faults+{fresh_url('tcp')}?checksum=true&corrupt_after={at}&seed={at}&only_rank=0&heartbeat=1"
    errors = end_of("sizes", url)
    assert errors
    for error in errors:
        assert isinstance(error, PeerLostError | CommunicatorClosedError), error


def test_without_checksums_heads_alone_are_guarded() -> None:
    """What the parameter is for: the same damage in a payload passes without it."""
    fault = "corrupt_after=8000000&only_rank=0"
    (first, *_) = end_of("sizes", f"faults+{fresh_url('tcp')}?{fault}&linger=0.1")
    assert isinstance(first, AssertionError)
    for error in end_of("sizes", f"faults+{fresh_url('tcp')}?{fault}&checksum=true"):
        assert not isinstance(error, AssertionError)
