"""The documentation is true to the code, and its links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import ruda_async
from ruda_async import environment, errors, traits
from ruda_async.collectives.selector import known_algorithms
from ruda_async.operations import AsyncOperations
from ruda_async.tensors.dtypes import DTYPES
from ruda_async.transport.conformance import SCENARIOS, run_scenario
from ruda_async.transport.registry import register_plugin, unregister_plugin

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for name in ("docs", "examples", "benchmarks") for page in (ROOT / name).rglob("*.md")),
    ]
)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------- generated parts


@pytest.mark.skipif(sys.platform != "linux", reason="opens every bundled transport")
@pytest.mark.parametrize(
    "page", [p for p in PAGES if "<!-- generated: " in p.read_text("utf-8")], ids=page_id
)
def test_generated_parts_are_up_to_date(generate: ModuleType, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generate.generated(text) == text, "run `python docs/generate.py`"


def test_stale_parts_are_noticed(generate: ModuleType) -> None:
    text = text_of("docs/transports/tcp.md")
    stale = text.replace("| `heartbeat` |", "| `heart_beat` |")
    assert stale != text
    assert generate.generated(stale) == text


def test_every_formula_is_written_in_symbols(generate: ModuleType) -> None:
    rows = generate.candidates()
    assert {row.algorithm for row in rows} == set(known_algorithms())
    for row in rows:
        assert re.fullmatch(r"[\w αβγ⁺¹⌊⌋⌈⌉₂+\N{MINUS SIGN}/()]+", row.seconds), row
        assert not re.search(r"\bc\b|_|[a-z]{4}", re.sub("pipe|show", "", row.seconds)), row
    ring = next(row for row in rows if row[:2] == ("all_gather", "ring"))
    assert ring.seconds.encode("ascii", "namereplace") == (
        b"(p \\N{MINUS SIGN} 1) (\\N{GREEK SMALL LETTER ALPHA} + n \\N{GREEK SMALL LETTER BETA})"
    )


# ---------------------------------------------------------------------- links


def anchors(text: str) -> set[str]:
    """Headings as GitHub makes anchors of them, and explicit ones."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.is_file(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(other.read_text(encoding="utf-8")), f"{page.name} links to {target}"


def test_every_page_is_reachable_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in reached or not page.is_file():
            continue
        reached.add(page)
        targets = re.findall(r"\]\(([\w./-]+\.md)", page.read_text(encoding="utf-8"))
        ahead += [(page.parent / target).resolve() for target in targets]
    assert set((ROOT / "docs").rglob("*.md")) <= reached


# ---------------------------------------------------------------------- examples


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_examples_are_python(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for block in blocks:
        compile(block, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_worked_sums_come_out_as_written() -> None:
    blocks = re.findall(r"^```pycon\n(.*?)^```$", text_of("docs/concepts.md"), re.DOTALL | re.MULTILINE)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "concepts.md", "docs/concepts.md", 0)
    assert len(test.examples) >= 8
    output: list[str] = []
    assert doctest.DocTestRunner().run(test, out=output.append).failed == 0, "".join(output)


@pytest.fixture(scope="module")
def example() -> Iterator[str]:
    """The scheme of the transport that the page on transports walks through, put into use."""
    path = ROOT / "examples" / "unix_transport" / "ruda_unix.py"
    spec = importlib.util.spec_from_file_location("ruda_unix", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where `dataclass` looks annotations up
    try:
        spec.loader.exec_module(module)
        register_plugin(module.PLUGIN)
        yield module.PLUGIN.scheme
        unregister_plugin(module.PLUGIN.scheme)
    finally:
        del sys.modules[module.__name__]


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets")
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_example_of_a_transport_keeps_every_promise(example: str, name: str) -> None:
    run_scenario(name, f"{example}://{name}")


# ---------------------------------------------------------------------- completeness


def test_every_transport_has_a_page_with_its_parameters(generate: ModuleType) -> None:
    schemes = generate.bundled()
    assert {"memory", "shm", "tcp"} <= set(schemes)
    for scheme in schemes:
        assert f"<!-- generated: parameters {scheme} -->" in text_of(
            f"docs/transports/{generate.page_of(scheme)}.md"
        )
        assert f"](transports/{generate.page_of(scheme)}.md)" in text_of("docs/urls.md")


@pytest.mark.parametrize("package", ["autograd", "moe", "training"])
def test_every_public_name_is_on_its_page(package: str) -> None:
    pytest.importorskip("torch")
    names = set(importlib.import_module(f"ruda_async.{package}").__all__)
    if package == "autograd":
        names -= {"AsyncDifferentiableCommunicator", "DifferentiableCommunicator"}  # see differentiable()
    elif package == "moe":
        names -= {"Dispatch", "ExpertsFn", "Routing"}  # results and arguments of the functions named there
    assert names <= set(re.findall(r"\w+", text_of(f"docs/{package}.md")))


def test_every_call_is_in_the_table_with_its_arguments() -> None:
    text = text_of("docs/operations.md")
    rows = dict(re.findall(r"^\| `(\w+)\(([^)]*)\)` \|", text, re.MULTILINE))
    calls = {n: f for n, f in inspect.getmembers(AsyncOperations, inspect.isfunction) if n[0] != "_"}
    for name in (
        *("send", "recv", "channel", "split", "bounded", "shrink", "grow"),
        *("recv_any", "subgroup", "empty", "stats", "describe", "explain", "flight_record", "last_failure"),
    ):
        calls[name] = getattr(ruda_async.AsyncCommunicator, name)
    assert set(rows) == set(calls)
    for name, call in calls.items():
        parameters = inspect.signature(call).parameters.values()
        shown = [p for p in parameters if p.name not in ("self", "out", "order", "timeout")]
        if name == "scatter":  # `like` is explained below the table
            shown = [p for p in shown if p.name != "like"]
        expected = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in shown]
        assert rows[name].replace('"', "'") == ", ".join(expected), name


def test_every_dtype_and_protocol_is_named() -> None:
    text = text_of("docs/operations.md")
    words = set(re.findall(r"\w+", text))
    assert set(DTYPES) <= words
    assert {n for n in traits.__all__ if not n.startswith("Async")} <= words


def test_every_error_has_a_section_with_its_builtin() -> None:
    text = text_of("docs/errors.md")
    sections = set(re.findall(r"^### `(\w+)`$", text, re.MULTILINE))
    assert sections == set(errors.__all__) - {"RudaError"}
    for name in sections:
        builtin = next(
            (b.__name__ for b in getattr(errors, name).__bases__ if b.__module__ == "builtins"), None
        )
        assert re.search(rf"── {name}{f' .{builtin}.' if builtin else ''}$", text, re.MULTILINE), name


def test_every_algorithm_has_a_source() -> None:
    sources = text_of("docs/algorithms.md").partition("## Sources")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", sources, re.MULTILINE)) == set(known_algorithms())


def test_every_variable_that_the_code_names_is_in_the_table() -> None:
    table = set(
        re.findall(r"`(RUDA_[A-Z_]+)`", text_of("docs/urls.md").partition("## Environment variables")[2])
    )
    code = [path for folder in ("ruda_async", "transports") for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in code for name in re.findall(r"\bRUDA_[A-Z_]*[A-Z]\b", path.read_text("utf-8"))}
    assert named == table


def test_every_benchmark_is_on_its_page() -> None:
    scripts = {
        path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text("utf-8")
    }
    assert scripts == set(re.findall(r"`python benchmarks/(\w+\.py)", text_of("benchmarks/README.md")))


def test_launchers_are_those_of_the_code() -> None:
    text = text_of("docs/launch.md").partition('<a id="env">')[2]
    assert environment.__doc__ is not None
    variables = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b|\bRANK\b", environment.__doc__)) - {"RUDA_URL"}
    assert len(variables) > 12
    assert variables <= set(re.findall(r"[A-Z_]+", text))
