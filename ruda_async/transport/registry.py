"""Which transports there are.

Plugins are found by the entry-point group ``ruda_async.transports``: the entry's name is the URL scheme,
its value the plugin object. Entry points are listed without importing anything; a plugin is imported when
it is first used.

A *wrapper* is a plugin that puts itself around another one, as in ``faults+tcp://…``: it has the
attribute ``wraps = True`` and the method ``wrap(inner)``, which returns a plugin of its own for that pair
(see `WrapperPlugin`). A scheme that is registered whole, plus sign and all, wins over a wrapper.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, Protocol, cast
from urllib.parse import urlsplit

from ..errors import ConfigError, TransportUnavailableError
from ..installing import how_to_install
from .base import Plugin
from .parameters import near

__all__ = [
    "GROUP",
    "PluginInfo",
    "WrapperPlugin",
    "composable_plugins",
    "default_plugin",
    "get_plugin",
    "is_network",
    "plugins",
    "register_plugin",
    "unregister_plugin",
    "why_unavailable",
]

GROUP = "ruda_async.transports"

_MEMBERS = ("scheme", "summary", "unavailable")
_PLUGIN_MEMBERS = (*_MEMBERS, "parameters", "rank_per", "example", "preference", "connect")
_WRAPPER_MEMBERS = (*_MEMBERS, "wrap")


class WrapperPlugin(Protocol):
    """What an entry point may name instead of a `Plugin`: a transport around any other transport.

    Attributes:
        scheme: the part of the URL's scheme before ``+``.
        summary: one line for people.
        parameters: the wrapper's own URL parameters; `merge_parameters` joins them with the inner ones.
        wraps: True.
    """

    scheme: str
    summary: str
    parameters: type[Any]
    wraps: Literal[True]

    def unavailable(self) -> str | None:
        """As `Plugin.unavailable`, for the wrapper itself."""
        ...

    def wrap(self, inner: Plugin) -> Plugin:
        """A plugin whose scheme is ``wrapper+inner``, whose example is one too, and which takes both's
        parameters."""
        ...


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A plugin that is known and maybe not imported.

    Attributes:
        scheme: the URL scheme.
        origin: where it comes from, such as ``"ruda_tcp:PLUGIN of ruda-async 0.1.0"``.
    """

    scheme: str
    origin: str
    _entry: importlib.metadata.EntryPoint | None = field(default=None, repr=False)
    _plugin: Any = field(default=None, repr=False)

    def load(self) -> Plugin | WrapperPlugin:
        """The plugin object, imported at the first call.

        Raises:
            TransportUnavailableError: it cannot be imported, or is no plugin.
        """
        if self._entry is None:
            return cast("Plugin | WrapperPlugin", self._plugin)
        return _load(self.scheme, self.origin, self._entry)


_registered: dict[str, PluginInfo] = {}


def plugins() -> dict[str, PluginInfo]:
    """All plugins by scheme, in alphabetical order; nothing is imported."""
    return dict(sorted((_entry_points() | _registered).items()))


def register_plugin(plugin: Plugin | WrapperPlugin) -> None:
    """Add a plugin of this process, before an entry point of the same scheme.

    Raises:
        TransportUnavailableError: the object lacks members that a plugin has.
    """
    _check(plugin, origin := f"{type(plugin).__module__}.{type(plugin).__qualname__}")
    _registered[plugin.scheme] = PluginInfo(plugin.scheme, origin, _plugin=plugin)


def unregister_plugin(scheme: str) -> None:
    """Take back `register_plugin`; harmless for a scheme that was not registered."""
    _registered.pop(scheme, None)


def get_plugin(scheme: str) -> Plugin:
    """The plugin of a URL's scheme; ``wrapper+inner`` gives the wrapper around the inner plugin.

    Raises:
        ConfigError: there is no such scheme; the text lists those there are.
        TransportUnavailableError: the plugin cannot be imported; the text says what to install.
    """
    known = plugins()
    info = known.get(scheme)
    if info is not None:
        plugin = info.load()
        if _wraps(plugin):
            raise ConfigError(
                f"{scheme}:// goes around another transport; write {scheme}+ and its scheme, "
                f"one of {', '.join(s for s in known if s != scheme)}"
            )
        return cast("Plugin", plugin)
    outer, plus, inner = scheme.partition("+")
    if not plus or outer not in known:
        listed = ", ".join(known) or "none; install ruda-async itself (pip install . in its checkout)"
        whole = not plus or any(name.startswith(f"{outer}+") for name in known)
        name, where = (scheme, "") if whole else (outer, f" in {scheme!r:.80}")
        raise ConfigError(f"unknown scheme {name!r:.80}{where}{near(name, known) or ';'} there are {listed}")
    wrapper = known[outer].load()
    if not _wraps(wrapper):
        raise ConfigError(
            f"{scheme}://: {outer} does not go around other transports; write {outer}:// or {inner}://"
        )
    return cast("WrapperPlugin", wrapper).wrap(get_plugin(inner))


def default_plugin(rank_per: str = "process", network: bool | None = None) -> Plugin:
    """The transport to take where none is named: of those usable here, the most preferred.

    Args:
        rank_per: ``"process"`` or ``"task"``, as `Plugin.rank_per`; what an engine places is no default.
        network: True for one that links hosts (see `is_network`), False for one that does not, None for any.

    Raises:
        TransportUnavailableError: none is usable; the text says why each is not.
    """
    fitting: list[PluginInfo] = []
    for info in plugins().values():
        try:
            plugin = cast("Plugin", info.load())
        except TransportUnavailableError:
            continue
        if _wraps(plugin) or plugin.rank_per != rank_per or network not in (None, is_network(plugin)):
            continue
        fitting.append(info)
    # To ask may import a large library, so the less preferred are asked only where they are needed.
    for info in sorted(fitting, key=lambda info: -cast("Plugin", info.load()).preference):
        if why_unavailable(info) is None:
            return cast("Plugin", info.load())
    every = ((scheme, why_unavailable(info)) for scheme, info in plugins().items())
    reasons = [f"{scheme}: {reason}" for scheme, reason in every if reason is not None]
    kind = {True: " over a network", False: " on one host", None: ""}[network]
    raise TransportUnavailableError(
        f"no transport is usable for ranks in a {rank_per} each{kind} "
        f"({'; '.join(reasons) or 'none is installed'}); install one, or name one in a URL"
    )


def composable_plugins() -> list[Plugin]:
    """The plugins that can be one of several transports in a job, usable here or not, by scheme.

    They have a `Plugin` ``reach``. Those that cannot even be imported are left out.
    """
    found = []
    for info in plugins().values():
        try:
            plugin = info.load()
        except TransportUnavailableError:
            continue
        if not _wraps(plugin) and getattr(plugin, "reach", None) in ("host", "network"):
            found.append(cast("Plugin", plugin))
    return found


def why_unavailable(info: PluginInfo) -> str | None:
    """None when the plugin is usable here, else one line that says what is missing."""
    try:
        return info.load().unavailable()
    except TransportUnavailableError as error:
        return str(error)


def is_network(plugin: Plugin) -> bool:
    """Whether URLs of this plugin name a host and a port, as its example does."""
    return urlsplit(plugin.example).port is not None


# ---------------------------------------------------------------------- loading


@functools.cache
def _entry_points() -> dict[str, PluginInfo]:
    found: dict[str, PluginInfo] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        origin = f"{entry.value} of {entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        found.setdefault(entry.name, PluginInfo(entry.name, origin, entry))
    return found


@functools.cache
def _load(scheme: str, origin: str, entry: importlib.metadata.EntryPoint) -> Plugin | WrapperPlugin:
    try:
        plugin = entry.load()
    except ImportError as error:
        raise TransportUnavailableError(
            f"the transport {scheme!r} ({origin}) cannot be imported: {error}; "
            + _remedy(scheme, entry, error)
        ) from error
    except Exception as error:
        raise TransportUnavailableError(
            f"the transport {scheme!r} ({origin}) fails at import: {type(error).__name__}: {error}; "
            "report this to its authors, or uninstall it"
        ) from error
    _check(plugin, origin)
    if plugin.scheme != scheme:
        raise TransportUnavailableError(
            f"{origin} is the entry point {scheme!r} and calls itself {plugin.scheme!r:.80}; an entry point "
            "is named after its plugin's scheme"
        )
    return cast("Plugin | WrapperPlugin", plugin)


def _remedy(scheme: str, entry: importlib.metadata.EntryPoint, error: ImportError) -> str:
    """What to install: the extra named like the scheme where the distribution has one."""
    if entry.dist and scheme in (entry.dist.metadata.get_all("Provides-Extra") or ()):
        return how_to_install(scheme, distribution=entry.dist.name)
    missing = (error.name or "").partition(".")[0]
    return f"install the package that provides {missing or 'it'}" + (
        f" (pip install {missing})" if missing else ""
    )


def _check(plugin: Any, origin: str) -> None:
    members = _WRAPPER_MEMBERS if _wraps(plugin) else _PLUGIN_MEMBERS
    # A class is asked first, so that no property of a plugin has to be worked out for this.
    lacking = [name for name in members if not hasattr(type(plugin), name) and not hasattr(plugin, name)]
    if lacking:
        raise TransportUnavailableError(
            f"{origin} is no transport plugin: it lacks {', '.join(lacking)}; see ruda_async.transport.Plugin"
        )
    if isinstance(plugin, type):
        raise TransportUnavailableError(
            f"{origin} is the class {plugin.__qualname__}, and a plugin is an instance: "
            f"write {plugin.__qualname__}()"
        )
    parameters = inspect.getattr_static(plugin, "parameters", None)
    if isinstance(parameters, type) and not is_dataclass(parameters):
        raise TransportUnavailableError(
            f"{origin} is no transport plugin: its parameters, the class {parameters.__qualname__}, have "
            "to be a dataclass"
        )


def _wraps(plugin: Any) -> bool:
    return bool(getattr(plugin, "wraps", False))
