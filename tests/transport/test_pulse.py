"""Who stood still for long knows it when its connections end; who did not, does not claim it."""

from __future__ import annotations

import asyncio

import pytest

from ruda_async.transport import NO_GOODBYE, Pulse


class Clock:
    """A loop's clock, set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now


def pulse_of(heartbeat: float, grows: bool = True) -> tuple[Pulse, Clock]:
    clock = Clock()
    loop: asyncio.AbstractEventLoop = clock  # type: ignore[assignment]
    return Pulse(loop, heartbeat, grows), clock


@pytest.mark.parametrize("beaten", [False, True])
def test_a_long_pause_is_told_before_and_after_the_beat_that_was_due(beaten: bool) -> None:
    pulse, clock = pulse_of(2)
    clock.now += 31
    if beaten:
        assert pulse.beat()
        clock.now += 1
        assert not pulse.beat()
    assert "after this rank stood still for 31 s" in pulse.no_goodbye()
    assert "silent for 3 s (heartbeat=2)" in pulse.no_goodbye()


def test_who_cannot_come_again_is_not_told_to() -> None:
    pulse, clock = pulse_of(2, grows=False)
    clock.now += 31
    assert "after this rank stood still for 31 s" in pulse.no_goodbye()
    assert "start all ranks anew" in pulse.no_goodbye()
    assert "grow()" not in pulse.no_goodbye()


def test_a_pause_that_peers_bear_with_explains_nothing() -> None:
    pulse, clock = pulse_of(2)
    clock.now += 2.9
    assert pulse.no_goodbye() == NO_GOODBYE
    assert pulse.beat()  # late all the same


def test_a_pause_of_long_ago_explains_nothing() -> None:
    pulse, clock = pulse_of(2)
    clock.now += 31
    pulse.beat()
    for _ in range(4):
        clock.now += 1
        pulse.beat()
    assert pulse.no_goodbye() == NO_GOODBYE


def test_without_a_heartbeat_nobody_is_dropped_for_silence() -> None:
    pulse, clock = pulse_of(0)
    clock.now += 31
    assert pulse.no_goodbye() == NO_GOODBYE
