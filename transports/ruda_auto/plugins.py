"""What is asked of the plugins that may take part: whether they are usable, and one set of URL parameters."""

from __future__ import annotations

import typing
from dataclasses import Field, field, fields, make_dataclass
from functools import lru_cache
from typing import Any, TypeVar

from ruda_async.transport import Plugin

__all__ = ["joined", "part_for", "why_not"]

P = TypeVar("P")


@lru_cache(maxsize=16)
def joined(classes: tuple[type[Any], ...]) -> type[Any]:
    """A dataclass with every parameter that one of `classes` declares; one of two defaults has none.

    A value that is given goes to all transports that take a parameter of that name.
    """
    found: dict[str, tuple[Any, Field[Any]]] = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for declared in fields(cls):
            hint, first = found.setdefault(declared.name, (hints[declared.name], declared))
            if first.default != declared.default:
                nothing: Any = field(default=None, metadata=first.metadata)
                found[declared.name] = (hint | None, nothing)
    members = [
        (name, hint, field(default=one.default, metadata=one.metadata)) for name, (hint, one) in found.items()
    ]
    return make_dataclass("Parameters", members, frozen=True)


def part_for(cls: type[P], given: Any) -> P:
    """The parameters of one of the classes, with its own default where nothing was given."""
    values = {declared.name: getattr(given, declared.name) for declared in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in values.items() if value is not None})


def why_not(plugin: Plugin) -> str | None:
    """None where `plugin` is usable here, else one line that says why not; a careless one does not raise."""
    try:
        return plugin.unavailable()
    except Exception as error:
        return f"unavailable() raised {type(error).__name__}: {error}"
