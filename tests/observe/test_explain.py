"""Records made by hand: what `explain`, `merge` and the clocks make of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ruda_async.cli import main
from ruda_async.errors import ConfigError
from ruda_async.observe.clocks import align
from ruda_async.observe.explain import explain
from ruda_async.observe.merge import merge
from ruda_async.observe.reading import Record, load


def record(rank: int, calls: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    channels: dict[int, dict[str, Any]] = {}
    for call in calls:
        channel = channels.setdefault(
            call["channel"],
            {
                "id": call["channel"],
                "name": call["channel_name"],
                "members": call.get("members", [0, 1, 2]),
                "next": 0,
            },
        )
        channel["next"] = max(channel["next"], call.get("sequence", -1) + 1)
    return {
        "format": "ruda-async flight record",
        "version": 1,
        "reason": "test",
        "job": "lab",
        "rank": rank,
        "world_size": 3,
        "clock": {"id": "one", "monotonic": 100.0, "wall": 1e9 + 100.0},
        "lost": {},
        "channels": list(channels.values()),
        "operations": calls,
        **changes,
    }


def call(sequence: int, entered: float, finished: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "channel": 5,
        "channel_name": "main",
        "operation": "barrier",
        "sequence": sequence,
        "entered": entered,
        "finished": finished,
        "state": "in flight" if finished is None else "done",
        "bytes_sent": 0,
        "bytes_received": 0,
        **changes,
    }


def saved(folder: Path, *records: dict[str, Any]) -> list[Record]:
    paths = []
    for i, each in enumerate(records):
        paths.append(folder / f"{i}.json")
        paths[-1].write_text(json.dumps(each))
    return load(paths)


def test_a_chain_ends_at_its_cause(tmp_path: Path) -> None:
    """0 waits for 1 in one channel, 1 waits for 2 in another; 2 is in no call."""
    side = {"channel": 6, "channel_name": "side", "members": [1, 2]}
    pair = {"members": [0, 1]}
    found = explain(
        saved(
            tmp_path,
            record(0, [call(0, 90, 91, **pair), call(1, 95, None, **pair)]),
            record(1, [call(0, 90, 91, **pair), call(3, 94, None, **side)]),
            record(2, [call(2, 89, 89.5, **side)]),
        )
    )
    assert "rank 1 never entered barrier #1: it is in barrier #3 on channel 'side'" in found.text
    assert "rank 2 never entered barrier #3: it is in no call" in found.text
    assert found.culprits == (2,)


def test_a_rank_between_calls_is_named_with_its_last(tmp_path: Path) -> None:
    found = explain(
        saved(
            tmp_path,
            record(0, [call(0, 90, 91), call(1, 95, None)]),
            record(1, [call(0, 90, 91), call(1, 95.5, None)]),
            record(2, [call(0, 90, 91)]),
        )
    )
    assert found.culprits == (2,)
    assert "ranks 0, 1 wait in barrier #1, entered 5.0 s ago" in found.text
    assert "it is in no call; its last was barrier #0 on channel 'main', finished 9.0 s ago" in found.text
    assert found.text.endswith("look first at rank 2")


def test_a_rank_that_is_lost_is_the_cause(tmp_path: Path) -> None:
    failed = {"state": "failed", "outcome": "PeerLostError", "error": "gone", "present": [0, 1]}
    found = explain(
        saved(
            tmp_path,
            record(0, [call(1, 95, 96, **failed)], lost={"2": "rank 2 died"}),
            record(1, [call(1, 95, 96, **failed)], lost={"2": "rank 2 died"}),
        )
    )
    assert found.culprits == (2,)
    assert "rank 2 is lost: rank 2 died" in found.text
    assert "look first at rank 2 (lost)" in found.text


def test_what_was_got_over_is_not_explained(tmp_path: Path) -> None:
    timeout = {"state": "failed", "outcome": "CollectiveTimeoutError", "error": "late", "present": [0]}
    found = explain(saved(tmp_path, record(0, [call(1, 80, 81, **timeout), call(2, 82, 83)])))
    assert found.culprits == ()
    assert "nobody waits" in found.text


def test_whom_the_others_have_heard_of_is_not_missing(tmp_path: Path) -> None:
    """Rank 1 left no record, but rank 0 knows that it entered."""
    found = explain(
        saved(tmp_path, record(0, [call(1, 95, None, present=[0, 1])]), record(2, [call(0, 90, 91)]))
    )
    assert found.culprits == (2,)


def test_a_mismatch_is_told(tmp_path: Path) -> None:
    text = "rank 0 called barrier() but rank 1 called all_reduce()"
    failed = {"state": "failed", "outcome": "CollectiveMismatchError", "error": text, "present": [0]}
    assert text in explain(saved(tmp_path, record(0, [call(1, 95, 96, **failed)]))).text


# ---------------------------------------------------------------------- clocks


def test_clocks_of_other_hosts_are_found_within_the_stated_uncertainty(tmp_path: Path) -> None:
    """Barriers at true times, seen by three clocks that are far apart."""
    dice = random.Random(3)
    true = {0: 0.0, 1: 5000.0, 2: -7.25}
    calls: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
    now = 10_000.0
    for sequence in range(50):
        entered = {rank: now + dice.uniform(0, 2e-3) for rank in true}
        last = max(entered.values())
        for rank, offset in true.items():
            finished = last + dice.uniform(20e-6, 200e-6)
            calls[rank].append(call(sequence, entered[rank] - offset, finished - offset))
        now += 5e-3
    records = saved(
        tmp_path,
        *(
            record(
                rank,
                calls[rank],
                clock={
                    "id": f"host {rank}",
                    "monotonic": now - true[rank],
                    "wall": 1e9 + dice.uniform(-1, 1),
                },
            )
            for rank in true
        ),
    )
    found = align(records)
    for rank, offset in true.items():
        uncertainty = found.uncertainty[rank]
        assert uncertainty is not None
        assert abs(found.offsets[rank] - offset) <= uncertainty + 1e-9
        assert uncertainty < 1e-3
    trace = merge(records)
    for sequence in range(50):
        spans = [e for e in trace["traceEvents"] if e["name"] == f"barrier #{sequence}"]
        assert len(spans) == 3
        assert max(e["ts"] for e in spans) <= min(e["ts"] + e["dur"] for e in spans) + 20
        assert max(e["args"]["skew_microseconds"] for e in spans) < 4000
    assert trace["otherData"]["clocks"]["rank 1"]["from"] == "calls that both recorded"


def test_clocks_without_a_common_call_are_told_by_the_wall(tmp_path: Path) -> None:
    records = saved(
        tmp_path,
        record(0, [call(0, 90, 91)]),
        record(1, [call(7, 40, 41)], clock={"id": "two", "monotonic": 50.0, "wall": 1e9 + 101.0}),
    )
    found = align(records)
    assert found.offsets[1] == pytest.approx(51.0)
    assert found.uncertainty[1] is None
    assert "no call" in found.method[1]


def test_calls_that_contradict_each_other_are_not_believed(tmp_path: Path) -> None:
    records = saved(
        tmp_path,
        record(0, [call(0, 99.0, 99.1), call(1, 99.2, 99.3)]),
        record(
            1,
            [call(0, 49.0, 49.1), call(1, 10.0, 10.1)],
            clock={"id": "two", "monotonic": 50.0, "wall": 1e9 + 100.0},
        ),
    )
    found = align(records)
    assert found.offsets[1] == pytest.approx(50.0)
    assert "contradictory" in found.method[1]


def test_ranks_of_one_host_share_a_clock(tmp_path: Path) -> None:
    found = align(saved(tmp_path, record(0, [call(0, 90, 91)]), record(1, [call(0, 80, 81)])))
    assert found.offsets == {0: 0.0, 1: 0.0}


def test_overlapping_calls_lie_on_threads_of_their_own(tmp_path: Path) -> None:
    trace = merge(saved(tmp_path, record(0, [call(0, 90, 95), call(1, 91, 97), call(2, 96, 98)])))
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [e["tid"] for e in sorted(spans, key=lambda e: e["ts"])] == [1, 2, 1]
    assert [e["dur"] for e in sorted(spans, key=lambda e: e["ts"])] == [5e6, 6e6, 2e6]


# ---------------------------------------------------------------------- files


def test_of_each_rank_the_latest_record_is_taken(tmp_path: Path) -> None:
    clock = {"id": "one", "monotonic": 100.0, "wall": 2e9}
    (found,) = saved(tmp_path, record(0, [], reason="old"), record(0, [], reason="new", clock=clock))
    assert found.reason == "new"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSON"),
        ("[]", "no flight record"),
        ('{"format": "ruda-async flight record", "version": 99}', "version 99"),
        ('{"format": "ruda-async flight record", "version": 1}', "damaged"),
        (json.dumps(record(0, [], clock=5)), "damaged"),
        (json.dumps({**record(0, []), "operations": [{"channel": 1}]}), "damaged"),
    ],
)
def test_files_that_are_no_records(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert main(["trace", "explain", str(path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "bad.json" in error


def test_records_of_several_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"several jobs: 'lab' .* 'other'"):
        saved(tmp_path, record(0, []), record(1, [], job="other"))


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, record(0, []))
    assert main(["trace", "merge", str(tmp_path / "0.json"), "-o", str(tmp_path / "no" / "x")]) == 2
    assert "cannot write" in capsys.readouterr().err
