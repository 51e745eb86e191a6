from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruda_async.collectives.costs import case_of
from ruda_async.collectives.operation import Settings
from ruda_async.collectives.selector import choose, known_algorithms
from ruda_async.errors import ConfigError
from ruda_async.transport.base import Capabilities

OPERATIONS = [
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def pick(operation: str, nbytes: int, size: int, *, exact: bool = True, widens: bool = False) -> str:
    return choose(operation, nbytes, size, Capabilities(), Settings(), exact=exact, widens=widens).algorithm


@given(
    operation=st.sampled_from(OPERATIONS),
    nbytes=st.integers(0, 1 << 40),
    size=st.integers(1, 4096),
    latency=st.floats(1e-7, 1),
    bandwidth=st.floats(1e3, 1e12),
    algorithm=st.one_of(st.none(), st.sampled_from(known_algorithms())),
    exact=st.booleans(),
    widens=st.booleans(),
)
def test_every_call_gets_a_known_algorithm_and_a_reason(
    operation: str,
    nbytes: int,
    size: int,
    latency: float,
    bandwidth: float,
    algorithm: str | None,
    exact: bool,
    widens: bool,
) -> None:
    choice = choose(
        operation,
        nbytes,
        size,
        Capabilities(latency=latency, bandwidth=bandwidth),
        Settings(algorithm=algorithm),
        exact=exact,
        widens=widens,
    )
    assert choice.algorithm in known_algorithms()
    assert choice.reason
    if algorithm is not None:
        assert f"algorithm={algorithm!r}" in choice.reason
    if operation == "reduce_scatter":
        assert choice.algorithm != "ring" or not exact
        assert choice.algorithm != "recursive_halving" or size & (size - 1) == 0


@pytest.mark.parametrize(
    ("operation", "nbytes", "size", "expected"),
    [
        ("all_reduce", 8, 2, "direct"),
        ("all_reduce", 8, 4, "direct"),
        ("all_reduce", 32 << 10, 4, "recursive_doubling"),
        ("all_reduce", 8, 64, "recursive_doubling"),
        ("all_reduce", 96 << 10, 8, "rabenseifner"),
        ("all_reduce", 100_000, 16, "rabenseifner"),
        ("all_reduce", 64 << 20, 2, "pairwise"),
        ("all_reduce", 64 << 20, 16, "pairwise"),
        ("reduce_scatter", 64 << 20, 2, "pairwise"),
        ("reduce_scatter", 4096, 8, "recursive_halving"),
        ("reduce_scatter", 4096, 6, "pairwise"),
        ("reduce", 8, 3, "direct"),
        ("reduce", 8, 16, "binomial"),
        ("reduce", 64 << 20, 4, "reduce_scatter_gather"),
        ("all_gather", 8, 3, "direct"),
        ("all_gather", 64 << 20, 8, "direct"),
        ("all_gather", 8, 64, "recursive_doubling"),
        ("all_gather", 1 << 20, 16, "ring"),
        ("all_gather_v", 8, 8, "direct"),
        ("all_gather_v", 8, 128, "ring"),
        ("broadcast", 1024, 16, "binomial"),
        ("broadcast", 64 << 20, 16, "scatter_all_gather"),
        ("gather", 1024, 4, "direct"),
        ("gather", 1024, 16, "binomial"),
        ("gather", 64 << 20, 16, "direct"),
        ("scatter", 0, 8, "direct"),
        ("scatter", 0, 16, "binomial"),
        ("all_to_all", 256 * 16, 16, "bruck"),
        ("all_to_all", 256 * 8, 7, "pairwise"),
        ("all_to_all", 64 << 10, 16, "pairwise"),
    ],
)
def test_what_is_picked(operation: str, nbytes: int, size: int, expected: str) -> None:
    assert pick(operation, nbytes, size) == expected


def test_a_ring_of_sums_is_for_any_order() -> None:
    long = 1 << 30
    for operation in ("all_reduce", "reduce_scatter"):
        assert pick(operation, long, 16) == "pairwise"
        assert pick(operation, long, 16, exact=False) == "ring"


def test_wide_partial_results_count_twice() -> None:
    nbytes = 40_000
    assert pick("all_reduce", nbytes, 16) == "recursive_doubling"
    assert pick("all_reduce", nbytes, 16, widens=True) == "rabenseifner"


def test_a_name_is_taken_where_it_can_run() -> None:
    def named(operation: str, algorithm: str, size: int = 6) -> tuple[str, str]:
        return choose(operation, 8, size, Capabilities(), Settings(algorithm=algorithm))[:2]

    assert named("all_reduce", "ring")[0] == "ring"
    algorithm, reason = named("broadcast", "ring")
    assert algorithm == "binomial"
    assert "(algorithm='ring' is not one for broadcast)" in reason
    algorithm, reason = named("reduce_scatter", "recursive_halving")
    assert algorithm == "pairwise"
    assert "needs a power of two of ranks" in reason
    assert named("reduce_scatter", "recursive_halving", 4)[0] == "recursive_halving"
    assert 'needs order="any"' in named("reduce_scatter", "ring")[1]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm='rign' is not known.*pairwise.*ring"):
        choose("all_reduce", 8, 2, Capabilities(), Settings(algorithm="rign"))
    with pytest.raises(ConfigError, match=r"'allreduce'; there are .*all_reduce"):
        choose("allreduce", 8, 2, Capabilities(), Settings())


def test_thresholds_follow_the_transport() -> None:
    nbytes = 1 << 20
    slow = Capabilities(latency=1e-3, bandwidth=1e9)
    assert choose("all_reduce", nbytes, 2, slow, Settings()).algorithm == "direct"
    assert pick("all_reduce", nbytes, 2) == "pairwise"


# ---------------------------------------------------------------------- the model


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_fastest_by_its_own_estimate_is_picked(operation: str) -> None:
    for size in (2, 3, 4, 7, 8, 16, 33):
        for nbytes in (0, 8, 4096, 1 << 16, 1 << 20, 1 << 28):
            choice = choose(operation, nbytes, size, Capabilities(), Settings())
            times = [time for _, time in choice.estimates]
            assert choice.algorithm == choice.estimates[0][0]
            assert times == sorted(times)
            assert all(time > 0 for time in times)


@given(size=st.integers(2, 1024), nbytes=st.integers(1, 1 << 30))
def test_estimates_grow_with_bytes_and_ranks(size: int, nbytes: int) -> None:
    for operation in OPERATIONS:
        small = dict(choose(operation, nbytes, size, Capabilities(), Settings()).estimates)
        more_bytes = dict(choose(operation, 2 * nbytes, size, Capabilities(), Settings()).estimates)
        assert all(more_bytes[name] >= time for name, time in small.items())
        # Folding makes sizes between powers of two dearer; among powers of two more ranks cost more.
        power = 1 << size.bit_length() - 1
        some = dict(choose(operation, 1 << 16, power, Capabilities(), Settings()).estimates)
        many = dict(choose(operation, 1 << 16, 2 * power, Capabilities(), Settings()).estimates)
        assert all(many[name] > time for name, time in some.items())


def test_the_textbook_forms() -> None:
    """Against Thakur, Rabenseifner & Gropp (2005) and Chan et al. (2007), where no term of ours is added."""
    beta, gamma, size, nbytes = 1e-9, 1e-10, 8, 1 << 20
    model = Capabilities(latency=1e-5, bandwidth=1 / beta, overhead=1e-5, reduction=1 / gamma)
    # What a round and a further message cost is more than the transport's part of it.
    case = case_of(nbytes, size, model, False, True)
    alpha, further = case.alpha, case.overhead
    assert (alpha, further) > (model.latency, model.overhead)

    def seconds(operation: str, exact: bool = True) -> dict[str, float]:
        return dict(choose(operation, nbytes, size, model, Settings(), exact=exact).estimates)

    moved, lg = (size - 1) / size * nbytes, 3
    assert seconds("all_reduce", exact=False)["ring"] == pytest.approx(
        2 * (size - 1) * alpha + 2 * moved * beta + moved * gamma
    )
    assert seconds("all_gather")["ring"] == pytest.approx((size - 1) * (alpha + nbytes * beta))
    assert seconds("broadcast")["binomial"] == pytest.approx(lg * (alpha + nbytes * beta))
    assert seconds("broadcast")["scatter_all_gather"] == pytest.approx(
        # A scatter that is direct, where theirs is a tree.
        size * alpha + (size - 2) * further + 2 * moved * beta
    )
    assert seconds("barrier")["dissemination"] == pytest.approx(lg * alpha)


def test_a_transport_whose_further_messages_are_dear_goes_by_trees() -> None:
    cheap = Capabilities(overhead=0.0)
    dear = Capabilities(overhead=20e-6)
    assert choose("all_reduce", 8, 8, cheap, Settings()).algorithm == "direct"
    assert choose("all_reduce", 8, 8, dear, Settings()).algorithm == "recursive_doubling"
