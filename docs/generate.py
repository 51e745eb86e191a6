"""Write the generated parts of the documentation from the code's own declarations.

    python docs/generate.py            rewrite them
    python docs/generate.py --check    exit with 1 where one is out of date

A generated part stands between ``<!-- generated: name -->`` and ``<!-- end -->``; some take an argument, as
in ``<!-- generated: parameters tcp -->``.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ruda_async.collectives import candidates as known_candidates
from ruda_async.collectives.operation import Settings
from ruda_async.collectives.selector import choose
from ruda_async.config import CommonParameters, resolve
from ruda_async.opening import open_transport
from ruda_async.transport import Capabilities
from ruda_async.transport.parameters import describe_parameters
from ruda_async.transport.registry import get_plugin, plugins

DOCS = Path(__file__).parent
#: The transports whose choices are shown: those that need nothing but this library.
CHOSEN = ("memory", "shm", "tcp")


def bundled() -> list[str]:
    """The schemes of this distribution; those that others add do not belong into this documentation."""
    return [scheme for scheme, info in plugins().items() if " of ruda-async " in info.origin]


def page_of(scheme: str) -> str:
    """The name of a transport's page: schemes that differ after a plus share one."""
    return scheme.partition("+")[0]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; bars inside cells are escaped."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# ---------------------------------------------------------------------- urls.md


def binary_size(nbytes: int) -> str:
    """``65536`` → ``64 KiB``."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} bytes"


def parameter_table(cls: type) -> str:
    """The parameters that a dataclass declares."""
    rows = []
    for row in describe_parameters(cls):
        default = f"{row.default} {row.unit}".strip() if row.default else ""
        if row.unit == "bytes" and row.default:
            default = binary_size(int(row.default))
        rows.append([f"`{row.name}`", row.type, default, row.doc])
    return table(["parameter", "type", "default", "meaning"], rows)


def parameters(scheme: str = "") -> str:
    """The parameters of one transport; without a scheme, those of every URL."""
    return parameter_table(plugins()[scheme].load().parameters if scheme else CommonParameters)


def transports() -> str:
    """The transports of this distribution and their pages."""
    rows = []
    for scheme in bundled():
        plugin = plugins()[scheme].load()
        example = getattr(plugin, "example", f"{scheme}+{get_plugin('tcp').example}")
        rows.append([f"[`{scheme}`](transports/{page_of(scheme)}.md)", plugin.summary, f"`{example}`"])
    return table(["scheme", "what carries the messages", "for example"], rows)


# ---------------------------------------------------------------------- algorithms.md

#: How the formulas read; applied in turn to their source text.
_WORDING = (
    (r"c\.show", "show"),
    (r"c\.seen", "\N{GREEK SMALL LETTER BETA}/3"),
    (r"c\.apart", "(h \N{MINUS SIGN} 1)/h"),
    (r"c\.size", "p"),
    (r"c\.halvings", "\N{LEFT FLOOR}log\N{SUBSCRIPT TWO} p\N{RIGHT FLOOR}"),
    (r"c\.rounds", "\N{LEFT CEILING}log\N{SUBSCRIPT TWO} p\N{RIGHT CEILING}"),
    (r"8 \* c\.typical", "8 pipe"),
    (r"c\.typical", "pipe"),
    (r"c\.peers", "(p \N{MINUS SIGN} 1)"),
    (r"c\.share", "(p \N{MINUS SIGN} 1)/p"),
    (r"c\.overhead", "o"),
    (r"c\.folds / 2", "f/2"),
    (r"c\.folds", "f"),
    (r"c\.nbytes / 2", "n/2"),
    (r"c\.nbytes", "n"),
    (r"c\.wide", "w"),
    (r"c\.fan", "fan"),
    (r"c\.crowd", "\N{GREEK SMALL LETTER BETA}\N{SUPERSCRIPT PLUS SIGN}"),
    (r"c\.whole", "\N{GREEK SMALL LETTER BETA}\N{SUPERSCRIPT ONE}"),
    (r"c\.alpha", "\N{GREEK SMALL LETTER ALPHA}"),
    (r"c\.beta", "\N{GREEK SMALL LETTER BETA}"),
    (r"c\.gamma", "\N{GREEK SMALL LETTER GAMMA}"),
    (r" \* ", " "),
    (r"n\+n", "n + n"),
)


class Row(NamedTuple):
    """One algorithm of one operation, as text."""

    operation: str
    algorithm: str
    seconds: str
    needs: str
    reason: str


def candidates() -> list[Row]:
    """The algorithms and their formulas, read from the source of `collectives.candidates`."""
    for node in ast.walk(ast.parse(inspect.getsource(known_candidates))):
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", None) == "CANDIDATES":
            tables = node.value
            break
    else:
        raise LookupError("ruda_async.collectives.candidates has no CANDIDATES")
    assert isinstance(tables, ast.Dict)
    found = []
    for (operation, known), rows in zip(known_candidates.CANDIDATES.items(), tables.values, strict=True):
        assert isinstance(rows, ast.Tuple)
        for candidate, row in zip(known, rows.elts, strict=True):
            assert isinstance(row, ast.Call)
            formula = row.args[1]
            assert isinstance(formula, ast.Lambda)
            text = ast.unparse(formula.body)
            for pattern, words in _WORDING:
                text = re.sub(pattern, words, text)
            found.append(Row(operation, candidate.algorithm, text, candidate.needs, candidate.reason))
    return found


def algorithms() -> str:
    """The algorithms of each operation, and what the model gives them."""
    rows, last = [], ""
    for row in candidates():
        shown = "" if row.operation == last else f"`{row.operation}`"
        reason = f"{row.reason}; needs {row.needs}" if row.needs else row.reason
        rows.append([shown, f"`{row.algorithm}`", row.seconds, reason])
        last = row.operation
    return table(["operation", "algorithm", "seconds", ""], rows)


async def capabilities_of(scheme: str) -> Capabilities:
    """What a transport says of itself: that of a job of one rank, which links to nobody."""
    transport = await open_transport(resolve(get_plugin(scheme).example, rank=0, world_size=1))
    try:
        return transport.capabilities
    finally:
        await transport.close()


def choices() -> str:
    """What `choose` answers for a few sizes on each transport; transports that agree share a row."""
    sizes = {"1 KiB": 1 << 10, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
    capabilities = {scheme: asyncio.run(capabilities_of(scheme)) for scheme in CHOSEN}
    rows = []
    for operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        for ranks in (2, 4, 16):
            agreeing: dict[tuple[str, ...], list[str]] = {}
            for scheme in CHOSEN:
                names = tuple(
                    f"`{choose(operation, nbytes, ranks, capabilities[scheme], Settings()).algorithm}`"
                    for nbytes in sizes.values()
                )
                agreeing.setdefault(names, []).append(f"`{scheme}`")
            rows += [[f"`{operation}`", str(ranks), ", ".join(who), *row] for row, who in agreeing.items()]
    return table(["operation", "ranks", "transport", *sizes], rows)


# ---------------------------------------------------------------------- transports.md

EXAMPLE = DOCS.parent / "examples" / "unix_transport" / "ruda_unix.py"


def example(kind: str, name: str) -> str:
    """A class or function of the example of a transport, as it stands in its file."""
    source = EXAMPLE.read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = source.splitlines()[first - 1 : node.end_lineno]
            return "\n".join(["```python", *lines, "```"])
    raise LookupError(f"{EXAMPLE.name} has no {kind} {name}")


PARTS: dict[str, Callable[..., str]] = {
    "parameters": parameters,
    "transports": transports,
    "example": example,
    "algorithms": algorithms,
    "choices": choices,
}


# ---------------------------------------------------------------------- files


def generated(text: str) -> str:
    """The text of a page with its generated parts written anew."""

    def part(match: re.Match[str]) -> str:
        name, *arguments = match[1].split()
        return f"<!-- generated: {match[1]} -->\n\n{PARTS[name](*arguments)}\n\n<!-- end -->"

    return re.sub(r"<!-- generated: ([\w+. -]+) -->.*?<!-- end -->", part, text, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated parts of the documentation.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where out of date")
    check = parser.parse_args().check
    stale = 0
    for page in sorted(DOCS.rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = generated(before)
        if after != before:
            stale += 1
            print(f"{page.relative_to(DOCS)} is out of date" if check else f"wrote {page.relative_to(DOCS)}")
            if not check:
                page.write_text(after, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
