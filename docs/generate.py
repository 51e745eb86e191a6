"""Write the generated parts of the documentation from the code's own declarations.

    python docs/generate.py            rewrite them
    python docs/generate.py --check    exit with 1 where one is out of date

A generated part stands between ``<!-- generated: name -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ruda_async.collectives import selector
from ruda_async.collectives.operation import Settings
from ruda_async.collectives.selector import choose
from ruda_async.communicator import open_transport
from ruda_async.config import CommonParameters, resolve
from ruda_async.transport import Capabilities
from ruda_async.transport.parameters import describe_parameters
from ruda_async.transport.registry import get_plugin

DOCS = Path(__file__).parent
#: Plugins that other distributions add do not belong into this documentation.
OURS = ("memory", "shm", "tcp", "ucx")
#: Those that need nothing but this library, whose choice of algorithms is shown.
UNIFORM = ("memory", "shm", "tcp")


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
        if row.unit == "bytes":
            default = binary_size(int(row.default))
        rows.append([f"`{row.name}`", row.type, default, row.doc])
    return table(["parameter", "type", "default", "meaning"], rows)


def parameters() -> str:
    """Common parameters, then a section per transport."""
    parts = ["## Common parameters", parameter_table(CommonParameters)]
    for scheme in OURS:
        plugin = get_plugin(scheme)
        parts.append(f"## {scheme}")
        parts.append(f"`{scheme}://`: {plugin.summary}. For example `{plugin.example}`.")
        parts.append(parameter_table(plugin.parameters))
    return "\n\n".join(parts)


# ---------------------------------------------------------------------- algorithms.md

#: How the selector's conditions read in words; applied in turn to their source text.
_WORDING = (
    (r"not c\.exact", '`order="any"`'),
    (r"_power_of_two\(c\)", "ranks are a power of two"),
    (r"_always", "otherwise"),
    (r"c\.nbytes", "bytes"),
    (r"c\.wide", "bytes"),
    (r"c\.size", "ranks"),
    (r"c\.pipe\b", "pipe"),
    (r"c\.segment", "segment"),
    (r"pipe / 2", "½ pipe"),
    (r"(\d) \* pipe", r"\1 pipes"),
    (r" \* ", " \N{MULTIPLICATION SIGN} "),
    (r" - ", " \N{MINUS SIGN} "),
    (r"<=", "≤"),
    (r">=", "≥"),
    (r"\((bytes [≤≥] [^()]*)\)", r"\1"),  # `ast.unparse` puts comparisons in brackets
)


def selector_rows() -> dict[str, list[tuple[str, str, str]]]:
    """The selector's tables as text: operation → (algorithm, condition, reason), read from its source."""
    for node in ast.walk(ast.parse(inspect.getsource(selector))):
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", None) == "_TABLES":
            tables = node.value
            break
    else:
        raise LookupError("ruda_async.collectives.selector has no _TABLES")
    assert isinstance(tables, ast.Dict)
    found = {}
    for key, rows in zip(tables.keys, tables.values, strict=True):
        assert key is not None
        assert isinstance(rows, ast.Tuple)
        found[str(ast.literal_eval(key))] = [_row(row) for row in rows.elts]
    return found


def _row(call: ast.expr) -> tuple[str, str, str]:
    assert isinstance(call, ast.Call)
    algorithm, applies, reason = call.args
    condition = ast.unparse(applies.body if isinstance(applies, ast.Lambda) else applies)
    for pattern, words in _WORDING:
        condition = re.sub(pattern, words, condition)
    return ast.literal_eval(algorithm), condition, ast.literal_eval(reason)


def algorithms() -> str:
    """The selector's tables, row by row."""
    rows = [
        [f"`{operation}`" if first else "", f"`{algorithm}`", condition, reason]
        for operation, cases in selector_rows().items()
        for first, (algorithm, condition, reason) in zip([True] + [False] * len(cases), cases, strict=False)
    ]
    return table(["operation", "algorithm", "when", "why"], rows)


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
    capabilities = {scheme: asyncio.run(capabilities_of(scheme)) for scheme in UNIFORM}
    rows = []
    for operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        for ranks in (2, 4, 16):
            agreeing: dict[tuple[str, ...], list[str]] = {}
            for scheme in UNIFORM:
                names = tuple(
                    f"`{choose(operation, nbytes, ranks, capabilities[scheme], Settings()).algorithm}`"
                    for nbytes in sizes.values()
                )
                agreeing.setdefault(names, []).append(f"`{scheme}`")
            rows += [[f"`{operation}`", str(ranks), ", ".join(who), *row] for row, who in agreeing.items()]
    return table(["operation", "ranks", "transport", *sizes], rows)


PARTS: dict[str, Callable[[], str]] = {
    "parameters": parameters,
    "algorithms": algorithms,
    "choices": choices,
}


# ---------------------------------------------------------------------- files


def generated(text: str) -> str:
    """The text of a page with its generated parts written anew."""

    def part(match: re.Match[str]) -> str:
        return f"<!-- generated: {match[1]} -->\n\n{PARTS[match[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- generated: (\w+) -->.*?<!-- end -->", part, text, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated parts of the documentation.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where out of date")
    check = parser.parse_args().check
    stale = 0
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = generated(before)
        if after != before:
            stale += 1
            print(f"{page.name} is out of date" if check else f"wrote {page.name}")
            if not check:
                page.write_text(after, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
