"""URL parameters, declared once.

A plugin states its parameters as a frozen dataclass whose fields are made by `param`::

    @dataclass(frozen=True, slots=True)
    class TcpParameters:
        heartbeat: float = param(10.0, doc="silence that is still life", unit="s", minimum=0)

Parsing, error texts, `ruda-async doctor` and the documentation all come from that one declaration.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import ConfigError

__all__ = [
    "ParameterRow",
    "alike_text",
    "describe_parameters",
    "extract_parameters",
    "merge_parameters",
    "near",
    "param",
    "parse_parameters",
]

P = TypeVar("P")

_KEY = "ruda_async"
_TRUE = frozenset(("1", "true", "yes", "on"))
_FALSE = frozenset(("0", "false", "no", "off"))
_INTEGER = re.compile(r"[+-]?[0-9]+\Z")
_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ]*)\Z")
#: ``k``, ``M`` and ``G`` are powers of 1024 as in the tools of the field; ``kB`` and so on are of 1000.
_SIZES = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_DURATIONS = {"": 1.0, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class _Spec:
    doc: str
    unit: str | None
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]
    alike: bool


class ParameterRow(NamedTuple):
    """One parameter, as text for people; see `describe_parameters`."""

    name: str
    type: str
    default: str
    unit: str
    doc: str


def param(
    default: Any,
    *,
    doc: str,
    unit: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Iterable[str] = (),
    alike: bool = False,
) -> Any:
    """A dataclass field that is a URL parameter.

    Args:
        default: its value where nothing is given.
        doc: one line for people.
        unit: what a number counts. ``"bytes"`` also takes sizes (``64k``, ``4MiB``, ``1GB``) and ``"s"``
            durations (``500ms``, ``2min``).
        minimum, maximum: the range of a number, ends included.
        choices: the texts that are taken, where they are few.
        alike: it has to be the same on all ranks. `Job.meet` sees to that.
    """
    spec = _Spec(doc, unit, minimum, maximum, tuple(choices), alike)
    return field(default=default, metadata={_KEY: spec})


def parse_parameters(
    cls: type[P],
    scheme: str,
    raw: Mapping[str, Any],
    *,
    labels: Mapping[str, str] | None = None,
    also: Iterable[str] = (),
) -> P:
    """An instance of `cls` from texts (of a URL) and objects (of keyword arguments).

    Args:
        cls: a dataclass with fields made by `param`, annotated bool, int, float, str, Path or an Enum,
            optionally ``| None``.
        scheme: names the transport in error texts.
        raw: values by parameter name; None stands for "not given".
        labels: what error texts call a parameter, where not its name (an environment variable, say).
        also: names that are known elsewhere, listed where a name is unknown.

    Raises:
        ConfigError: an unknown name, or a value that is malformed or out of range.
    """
    known = _declared(cls)
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in known:
            raise ConfigError(_unknown(name, scheme, {*known, *also}))
        if value is not None:
            label = (labels or {}).get(name, name)
            values[name] = _convert(hints[name], known[name], label, value)
    return cls(**values)


def describe_parameters(cls: type[Any]) -> list[ParameterRow]:
    """A row per parameter of `cls`, in the order of declaration."""
    hints = typing.get_type_hints(cls)
    defaults = {f.name: f.default for f in fields(cls)}
    rows = []
    for name, spec in _declared(cls).items():
        kind = "|".join(spec.choices) if spec.choices else _type_name(_bare(hints[name]))
        doc = f"{spec.doc}; the same on all ranks" if spec.alike else spec.doc
        rows.append(ParameterRow(name, kind, _text(defaults[name]), spec.unit or "", doc))
    return rows


def alike_text(parameters: Any) -> str:
    """The parameters that have to be the same on all ranks, as ``name=value&…``; see `Job.alike`."""
    return "&".join(
        f"{name}={_text(getattr(parameters, name))}"
        for name, spec in _declared(type(parameters)).items()
        if spec.alike
    )


def merge_parameters(name: str, *classes: type[Any]) -> type[Any]:
    """One dataclass with the parameters of all `classes`: what a transport that wraps another takes.

    Raises:
        ConfigError: two of them declare the same name.
    """
    merged: dict[str, tuple[str, Any, Any]] = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for f in fields(cls):
            if f.name in merged:
                raise ConfigError(f"{name}: two layers declare the parameter {f.name!r}; rename it in one")
            merged[f.name] = (f.name, hints[f.name], field(default=f.default, metadata=f.metadata))
    return make_dataclass(name, merged.values(), frozen=True)


def extract_parameters(cls: type[P], merged: Any) -> P:
    """The part of a `merge_parameters` instance that belongs to `cls`."""
    return cls(**{f.name: getattr(merged, f.name) for f in fields(cls)})  # type: ignore[arg-type]


def near(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` where a known name is close to `name`, else nothing."""
    close = difflib.get_close_matches(name, list(known), 1, 0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


# ---------------------------------------------------------------------- one value


def _declared(cls: type[Any]) -> dict[str, _Spec]:
    return {f.name: _spec(f) for f in fields(cls)}


def _spec(f: Field[Any]) -> _Spec:
    spec = f.metadata.get(_KEY)
    if not isinstance(spec, _Spec) or f.default is MISSING:
        raise TypeError(f"the parameter {f.name!r} was not declared with param()")
    return spec


def _unknown(name: str, scheme: str, known: Iterable[str]) -> str:
    has = ", ".join(sorted(known)) or "no parameters"
    return f"{scheme}:// has no parameter {name!r:.80}{near(name, known) or ';'} it has {has}"


def _convert(hint: Any, spec: _Spec, label: str, value: Any) -> Any:
    """`value` as the declared type, in its range.

    Raises:
        ConfigError
    """
    kind = _bare(hint)
    try:
        converted = _converter(kind, spec)(value)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{label}={value!r:.80} is not {_accepted(kind, spec)}") from None
    if spec.choices and converted not in spec.choices:
        choices = ", ".join(spec.choices)
        guess = near(str(converted), spec.choices) or ";"
        raise ConfigError(f"{label}={value!r:.80} is not known{guess} it is one of {choices}")
    low, high = spec.minimum, spec.maximum
    if type(converted) is int and high is None and converted >= 1 << 63:
        raise ConfigError(f"{label}={value!r:.80} is out of range; it must be below 2**63")
    if isinstance(converted, (int, float)) and (
        (low is not None and converted < low) or (high is not None and converted > high)
    ):
        raise ConfigError(f"{label}={value!r:.80} is out of range; it must be {_range(spec)}")
    return converted


def _bare(hint: Any) -> Any:
    """``int | None`` → ``int``."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _converter(kind: Any, spec: _Spec) -> Callable[[Any], Any]:
    if kind is bool:
        return _to_bool
    if kind is int:
        return _to_size if spec.unit == "bytes" else _to_int
    if kind is float:
        return _to_duration if spec.unit == "s" else _to_float
    if kind is str:
        return _to_str
    if kind is Path:
        return lambda value: Path(value).expanduser()
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value: _to_enum(kind, value)
    raise AssertionError(f"param() does not know the type {kind!r}")


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise ValueError


def _to_int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str):
        if not _INTEGER.match(value):
            raise ValueError
        return int(value)
    return operator.index(value)


def _quantity(text: str, units: Mapping[str, float]) -> tuple[str, float]:
    match = _QUANTITY.match(text)
    if match is None or match[2].lower() not in units:
        raise ValueError
    return match[1], units[match[2].lower()]


def _to_size(value: Any) -> int:
    if not isinstance(value, str):
        return _to_int(value)
    number, unit = _quantity(value, _SIZES)
    size = int(number) * int(unit) if _INTEGER.match(number) else float(number) * unit
    if size != int(size):
        raise ValueError
    return int(size)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or (isinstance(value, str) and not _QUANTITY.match(value)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _to_duration(value: Any) -> float:
    if not isinstance(value, str):
        return _to_float(value)
    number, unit = _quantity(value, _DURATIONS)
    return _to_float(float(number) * unit)


def _to_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _to_enum(kind: type[Enum], value: Any) -> Enum:
    if isinstance(value, kind):
        return value
    for member in kind:
        if value == member.value or value == str(member.value) or value == member.name:
            return member
    raise ValueError


# ---------------------------------------------------------------------- texts


def _accepted(kind: Any, spec: _Spec) -> str:
    """What a parameter takes, in words that follow "is not"."""
    if kind is bool:
        return "a switch; write true or false"
    if kind is int:
        if spec.unit == "bytes":
            return "a size; write bytes as 65536, 64k or 4MiB"
        return f"a whole number{f' of {spec.unit}' if spec.unit else ''}"
    if kind is float:
        if spec.unit == "s":
            return "a number of seconds; write 2, 0.5, 500ms or 2min"
        return f"a number{f' of {spec.unit}' if spec.unit else ''}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "known; it is one of " + ", ".join(str(member.value) for member in kind)
    return "text" if kind is str else "a path"


def _range(spec: _Spec) -> str:
    unit = f" {spec.unit}" if spec.unit else ""
    low, high = spec.minimum, spec.maximum
    if low is not None and high is not None:
        return f"from {low:g} to {high:g}{unit}"
    return f"at least {low:g}{unit}" if low is not None else f"at most {high:g}{unit}"


def _type_name(kind: Any) -> str:
    names = {bool: "switch", int: "integer", float: "number", str: "text", Path: "path"}
    if kind in names:
        return names[kind]
    return "|".join(str(member.value) for member in kind)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)
