"""From times to figures, and how these are shown and kept."""

from __future__ import annotations

import asyncio
import html.parser
import io
import json
import platform
import re
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ruda_async import ConfigError
from ruda_async.bench.events import Inbox, Outbox
from ruda_async.bench.loops import PERIOD, Ticker
from ruda_async.bench.markdown import to_markdown
from ruda_async.bench.report import to_html
from ruda_async.bench.results import Machine, Report, Row, this_machine
from ruda_async.bench.shown import bandwidth, seconds, sections, times
from ruda_async.bench.statistics import ratio, summarize
from ruda_async.bench.svg import COLORS, PATTERNS, line_style
from ruda_async.bench.table import print_report

MACHINE = Machine(
    "Some CPU <fast>", 2, 8 << 30, "Linux", "6.1", "3.11.0", {"numpy": "2.0"}, "2026-01-01 00:00 UTC"
)


def row(name: str = "ruda", nbytes: int = 8, median: float = 1e-4, **more: Any) -> Row:
    plain: dict[str, Any] = {
        "operation": "all_reduce",
        "nbytes": nbytes,
        "dtype": "float32",
        "world": 2,
        "subject": "tcp async" if name == "ruda" else name,
        "name": name,
        "transport": "tcp" if name == "ruda" else "",
        "mode": "async" if name == "ruda" else "",
        "in_flight": 1,
        "placement": "processes",
        "reuse": False,
        "rounds": 2,
        "calls": 10,
        "median": median,
        "p90": median * 2,
        "p99": median * 3,
        "min": median / 2,
        "mean": median,
        "algorithm_bandwidth": nbytes / median,
        "bus_bandwidth": nbytes / median,
    }
    return Row(**(plain | more))


@pytest.fixture
def report() -> Report:
    rows = []
    for nbytes in (8, 4096):
        rows.append(row(nbytes=nbytes, stall=0.002, ratios={"gloo": 2.5, "numpy": 0.04}))
        rows.append(row("gloo", nbytes, 2.5e-4, note="it <emulates>"))
        rows.append(row("numpy", nbytes, 4e-6))
    return Report(MACHINE, rows, ["left out: mpi needs mpi4py"])


def test_summary() -> None:
    figures = summarize(np.arange(1, 102, dtype=float).reshape(1, 101))
    assert (figures.median, figures.p90, figures.p99, figures.min, figures.mean) == (51, 91, 100, 1, 51)
    assert figures.calls == 101


def test_drift_of_the_machine_cancels_in_ratios() -> None:
    drift = np.array([[1.0], [10.0], [100.0]])
    ours = drift * np.array([1.0, 1.0, 9.0])
    assert ratio(ours, 3 * drift * np.ones(4)) == 3


def test_units() -> None:
    assert [seconds(s) for s in (4.56e-6, 2.5e-4, 0.0123, 0.9996, 3, None, 2e-8)] == [
        "4.56 µs", "250 µs", "12.3 ms", "1000 ms", "3 s", "", "0.02 µs"
    ]  # fmt: skip
    assert [bandwidth(b) for b in (1.234e9, 9.998e8, 2.4e4, 12, 0)] == [
        "1.23 GB/s", "1 GB/s", "24 kB/s", "12 B/s", ""
    ]  # fmt: skip
    assert [times(t) for t in (2.5, 12.34, None)] == ["2.50x", "12.3x", ""]


def test_json_reads_back(report: Report) -> None:
    text = report.to_json()
    assert Report.from_json(text) == report
    data = json.loads(text)
    data["rows"][0]["later_field"] = 1
    assert Report.from_json(json.dumps(data)).rows == report.rows
    for wrong in (
        "{}",
        "[]",
        "nonsense",
        json.dumps({**data, "format": 99}),
        json.dumps({**data, "rows": [{}]}),
    ):
        with pytest.raises(ConfigError):
            Report.from_json(wrong)


def test_the_machine_has_no_name() -> None:
    machine = this_machine()
    assert machine.cores >= 1
    assert machine.python == platform.python_version()
    assert "numpy" in machine.versions
    assert platform.node() not in machine.line.split()


def test_sections_keep_what_belongs_together(report: Report) -> None:
    report.rows.append(row(world=4))
    found = sections(report)
    assert [(section.world, len(section.rows)) for section in found] == [(2, 6), (4, 1)]
    assert found[0].peers == ["gloo", "numpy"]
    assert [r.nbytes for r in found[0].rows] == [8, 8, 8, 4096, 4096, 4096]


def test_plain_table(report: Report) -> None:
    report.rows[0] = replace(report.rows[0], fault="rank 1: element 0 of the result is 1, not 2")
    file = io.StringIO()
    print_report(report, file)
    lines = file.getvalue().splitlines()
    assert lines[0] == MACHINE.line
    assert lines[2] == "all_reduce, 2 ranks as processes, float32"
    assert lines[3].split() == [
        "size", "what", "median", "p90", "p99", "min", "alg", "bw", "bus", "bw", "stall", "gloo",
        "numpy"
    ]  # fmt: skip
    assert "tcp async WRONG" in lines[4]
    assert lines[4].split()[-2:] == ["2.50x", "0.04x"]
    assert any(
        line.startswith("WRONG RESULT: all_reduce, 8 bytes, 2 ranks, tcp async: rank 1") for line in lines
    )
    assert lines[-1] == "left out: mpi needs mpi4py"


def test_rich_table_fits_the_terminal(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = {}
    for width in (80, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        file = Terminal()
        print_report(report, file)
        shown[width] = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    for text in shown.values():
        assert "tcp async" in text
        assert "2.50x" in text
        assert "…" not in text
    assert " min " in shown[160]
    assert " min " not in shown[80]


class Checker(html.parser.HTMLParser):
    """Every element that is opened is closed, in order; and nothing is fetched."""

    VOID = ("meta", "circle", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_html_stands_alone(report: Report) -> None:
    page = to_html(report)
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert checker.seen.count("figure") == 2
    assert "Some CPU &lt;fast&gt;" in page
    assert "it &lt;emulates&gt;" in page
    assert "prefers-color-scheme: dark" in page
    assert 'class="good">2.50x' in page
    assert 'class="bad">0.04x' in page
    assert "url(" not in page


def test_plots_have_the_points(report: Report) -> None:
    page = to_html(report)
    plots = [part for part in page.split("<svg")[1:] if 'role="img"' in part]
    for part in plots:
        root = ET.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>")
        titles = [element.text for element in root.iter("title")]
        assert len(titles) == 6
        for circle in root.iter("circle"):
            assert 0 < float(circle.attrib["cx"]) < 560
            assert 0 < float(circle.attrib["cy"]) < 320
    assert "tcp async, 4 KiB: 100 µs" in plots[0]
    assert "gloo, 8 B: 250 µs" in plots[0]


def test_texts_of_sizes_do_not_touch_and_ninth_colours_differ(report: Report) -> None:
    sizes = [8, *(1 << power for power in range(14, 29, 2))]
    report.rows = [row(nbytes=nbytes) for nbytes in sizes]
    page = to_html(report)
    part = next(part for part in page.split("<svg")[1:] if 'role="img"' in part)
    root = ET.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>")
    across = [float(text.attrib["x"]) for text in root.iter("text") if text.attrib["text-anchor"] == "middle"]
    assert 3 < len(across) < len(sizes)
    assert min(right - left for left, right in pairwise(across)) > 50
    # No two of many lines look alike.
    patterns = dict(re.findall(r"\.(\w+) \{ stroke-dasharray: ([\d ]+);", page))
    styles = [line_style(i, peer).split() for i in range(PATTERNS * COLORS) for peer in (False, True)]
    drawn = {(color, patterns.get(pattern, "")) for color, pattern in styles}
    assert len(drawn) == 2 * PATTERNS * COLORS


def test_one_size_is_not_plotted(report: Report) -> None:
    report.rows = [r for r in report.rows if r.nbytes == 8]
    assert 'role="img"' not in to_html(report)


def test_markdown(report: Report) -> None:
    page = to_markdown(report)
    assert f"Measured on: {MACHINE.line}." in page
    figures = "100 µs | 200 µs | 300 µs | 50 µs | 80 kB/s | 80 kB/s | 2 ms | 2.50x | 0.04x"
    assert f"| 8 B | tcp async | {figures} |" in page
    assert "* left out: mpi needs mpi4py" in page
    assert "Growth" not in page


def test_markdown_shows_growth_over_worlds(report: Report) -> None:
    report.rows = [row(world=w, median=w * 1e-4, ratios={"numpy": 0.5}) for w in (2, 4, 8)]
    page = to_markdown(report)
    assert "| operation | what | size | 2 ranks | 4 ranks | 8 ranks |" in page
    assert (
        "| all_reduce | tcp async, float32 | 8 B | 200 µs (2.00x) | 400 µs (2.00x) | 800 µs (2.00x) |" in page
    )


async def test_ticker_counts_every_tick_that_a_stall_swallowed() -> None:
    with Ticker() as ticker:
        await asyncio.sleep(5 * PERIOD)
        before = len(ticker.lateness)
        end = time.perf_counter() + 20 * PERIOD
        while time.perf_counter() < end:
            pass
    assert before >= 1
    assert max(ticker.lateness) >= 18 * PERIOD
    assert len(ticker.lateness) - before >= 18
    assert min(ticker.lateness) >= 0


def test_events_arrive_in_order() -> None:
    found: list[Any] = []
    with Inbox(found.append) as inbox:
        outbox = Outbox(inbox.address)
        for i in range(100):
            outbox.put("step", number=i, text="é\n")
        outbox.close()
        folder = inbox.folder
    assert found == [{"kind": "step", "number": i, "text": "é\n"} for i in range(100)]
    assert not folder.exists()


def test_an_inbox_that_nobody_wrote_to_ends() -> None:
    with Inbox(lambda event: None):
        pass


def test_an_error_of_the_handler_is_raised() -> None:
    def handle(event: Any) -> None:
        raise KeyError("row")

    def put() -> None:
        with Inbox(handle) as inbox:
            outbox = Outbox(inbox.address)
            outbox.put("row")
            outbox.close()

    with pytest.raises(KeyError):
        put()
