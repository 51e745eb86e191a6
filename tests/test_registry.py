"""Finding, naming and wrapping transports, and the parameters they declare."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_plugins import DelayParameters, FakePlugin, FakeWrapper, Mode, Nothing, Parameters
from hypothesis import given
from hypothesis import strategies as st

from ruda_async.errors import ConfigError, TransportUnavailableError
from ruda_async.transport import registry
from ruda_async.transport.parameters import (
    describe_parameters,
    extract_parameters,
    merge_parameters,
    parse_parameters,
)
from ruda_async.transport.registry import (
    default_plugin,
    get_plugin,
    is_network,
    plugins,
    register_plugin,
    unregister_plugin,
    why_unavailable,
)


@pytest.fixture(autouse=True)
def fakes() -> Iterator[None]:
    """``net`` (with ports), ``lab`` (without), ``slow`` (a wrapper) and ``torch+net`` (one whole name)."""
    known = [
        FakePlugin("net"),
        FakePlugin("lab", rank_per="task", example="lab://example", parameters=Nothing),
        FakeWrapper("slow"),
        FakePlugin("torch+net"),
    ]
    for plugin in known:
        register_plugin(plugin)
    yield
    for plugin in known:
        unregister_plugin(plugin.scheme)


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with an installed distribution of broken and whole plugins."""
    info = tmp_path / "strange_transports-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: strange-transports\nVersion: 1.2\nProvides-Extra: extra\n"
    )
    (info / "entry_points.txt").write_text(
        "[ruda_async.transports]\n"
        "good = strange_good:PLUGIN\n"
        "extra = strange_missing:PLUGIN\n"
        "lone = strange_missing:PLUGIN\n"
        "broken = strange_broken:PLUGIN\n"
        "poor = strange_poor:PLUGIN\n"
        "kind = strange_kind:PLUGIN\n"
        "mine = strange_good:PLUGIN\n"
        "loose = strange_loose:PLUGIN\n"
    )
    (tmp_path / "strange_good.py").write_text(
        "from fake_plugins import FakePlugin\nPLUGIN = FakePlugin('good')\n"
    )
    (tmp_path / "strange_missing.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "strange_broken.py").write_text("raise ZeroDivisionError('oops')\n")
    (tmp_path / "strange_poor.py").write_text("class PLUGIN:\n    scheme = 'poor'\n")
    (tmp_path / "strange_kind.py").write_text(
        "from fake_plugins import FakePlugin, Nothing\n"
        "class PLUGIN(FakePlugin):\n"
        "    scheme, parameters, rank_per, example, preference = 'kind', Nothing, 'process', 'kind://', 0\n"
    )
    (tmp_path / "strange_loose.py").write_text(
        "from fake_plugins import FakePlugin\nPLUGIN = FakePlugin('loose', parameters=dict)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._entry_points.cache_clear()
    yield tmp_path
    registry._entry_points.cache_clear()
    for name in [name for name in sys.modules if name.startswith("strange_")]:
        sys.modules.pop(name, None)


# ---------------------------------------------------------------------- the registry


def test_listing_imports_no_plugin(distribution: Path) -> None:
    assert {"good", "extra", "broken", "net", "slow"} <= set(plugins())
    assert not {"strange_good", "strange_broken"} & set(sys.modules)
    assert plugins()["good"].origin == "strange_good:PLUGIN of strange-transports 1.2"
    assert get_plugin("good").scheme == "good"
    assert "strange_good" in sys.modules


@pytest.mark.parametrize(
    ("scheme", "parts"),
    [
        ("extra", ["'extra'", "a_package_nobody_has", "pip install 'strange-transports[extra]'"]),
        ("lone", ["'lone'", "pip install a_package_nobody_has"]),
        ("broken", ["'broken'", "ZeroDivisionError: oops", "strange-transports 1.2"]),
        ("poor", ["strange_poor:PLUGIN", "lacks", "connect", "parameters"]),
        ("kind", ["strange_kind:PLUGIN", "is the class PLUGIN", "an instance: write PLUGIN()"]),
        ("mine", ["strange_good:PLUGIN", "the entry point 'mine'", "calls itself 'good'"]),
        ("loose", ["strange_loose:PLUGIN", "the class dict", "a dataclass"]),
    ],
)
def test_a_plugin_that_does_not_load_says_what_to_do(
    distribution: Path, scheme: str, parts: list[str]
) -> None:
    with pytest.raises(TransportUnavailableError) as caught:
        get_plugin(scheme)
    assert isinstance(caught.value, ImportError)
    for part in parts:
        assert part in str(caught.value)
    reason = why_unavailable(plugins()[scheme])
    assert reason is not None
    assert reason == str(caught.value)


def test_registered_before_entry_point(distribution: Path) -> None:
    mine = FakePlugin("good")
    register_plugin(mine)
    try:
        assert get_plugin("good") is mine
    finally:
        unregister_plugin("good")
    assert get_plugin("good") is not mine


def test_unknown_scheme_lists_and_suggests() -> None:
    with pytest.raises(ConfigError, match=r"unknown scheme 'nett'; did you mean 'net'\?.*\blab\b.*\bnet\b"):
        get_plugin("nett")
    with pytest.raises(ConfigError, match=r"unknown scheme 'slo' in 'slo\+net'; did you mean 'slow'"):
        get_plugin("slo+net")
    with pytest.raises(ConfigError, match="unknown scheme 'nowhere'"):
        get_plugin("slow+nowhere")


def test_registering_what_is_no_plugin() -> None:
    with pytest.raises(TransportUnavailableError, match="lacks scheme"):
        register_plugin(object())  # type: ignore[arg-type]


def test_wrappers() -> None:
    pair: Any = get_plugin("slow+net")
    assert pair.scheme == "slow+net"
    assert pair.inner is get_plugin("net")
    assert is_network(pair)
    twice: Any = get_plugin("slow+torch+net")
    assert twice.inner.scheme == "torch+net"
    assert get_plugin("torch+net").scheme == "torch+net"
    with pytest.raises(ConfigError, match=r"write slow\+ and its scheme, one of .*net"):
        get_plugin("slow")
    with pytest.raises(ConfigError, match="net does not go around other transports; write net:// or lab://"):
        get_plugin("net+lab")


def test_default_is_the_preferred_usable_one() -> None:
    made = [
        FakePlugin("best", preference=1000, unavailable="it needs hardware"),
        FakePlugin("good", preference=900),
        FakePlugin("near", preference=950, example="near://example"),
        FakePlugin("loop", preference=999, rank_per="task", example="loop://example"),
    ]
    for plugin in made:
        register_plugin(plugin)
    try:
        assert default_plugin().scheme == "near"
        assert default_plugin(network=True).scheme == "good"
        assert default_plugin("task").scheme == "loop"
        with pytest.raises(TransportUnavailableError, match="best: it needs hardware"):
            default_plugin("planet")
    finally:
        for plugin in made:
            unregister_plugin(plugin.scheme)


def test_import_is_light() -> None:
    heavy = ("torch", "rich", "argparse", "multiprocessing", "ruda_async.launch")
    code = f"import sys, ruda_async.config; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------------- parameters


def parsed(**raw: Any) -> Parameters:
    return parse_parameters(Parameters, "net", raw)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("heartbeat", "2", 2.0),
        ("heartbeat", "500ms", 0.5),
        ("heartbeat", "2min", 120.0),
        ("heartbeat", "1e1", 10.0),
        ("budget", "65536", 65536),
        ("budget", "64k", 65536),
        ("budget", "4MiB", 4 << 20),
        ("budget", "1.5k", 1536),
        ("budget", "2kB", 2000),
        ("budget", "1G", 1 << 30),
        ("retries", "7", 7),
        ("share", "0.25", 0.25),
        ("nodelay", "false", False),
        ("nodelay", "On", True),
        ("nodelay", "0", False),
        ("bind", "10.0.0.1", "10.0.0.1"),
        ("style", "fancy", "fancy"),
        ("mode", "safe", Mode.SAFE),
        ("mode", "SAFE", Mode.SAFE),
        ("certificate", "/etc/x.pem", Path("/etc/x.pem")),
    ],
)
def test_texts_become_values(name: str, text: str, value: Any) -> None:
    found = getattr(parsed(**{name: text}), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heartbeat", 3),
        ("budget", 4096),
        ("nodelay", False),
        ("mode", Mode.SAFE),
        ("certificate", Path("x")),
        ("share", 1),
    ],
)
def test_objects_pass(name: str, value: Any) -> None:
    assert getattr(parsed(**{name: value}), name) == value


def test_none_is_not_given() -> None:
    assert parsed(heartbeat=None, certificate=None) == Parameters()


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("heartbeat", "soon", ["heartbeat='soon'", "number of seconds", "500ms"]),
        ("heartbeat", "nan", ["heartbeat='nan'", "number of seconds"]),
        ("heartbeat", "1e999", ["heartbeat='1e999'", "number of seconds"]),
        ("heartbeat", float("inf"), ["heartbeat=inf", "number of seconds"]),
        ("heartbeat", "5 parsecs", ["heartbeat='5 parsecs'"]),
        ("heartbeat", "-1", ["heartbeat='-1'", "out of range", "from 0 to 3600 s"]),
        ("heartbeat", True, ["heartbeat=True", "number of seconds"]),
        ("budget", "lots", ["budget='lots'", "a size", "64k", "4MiB"]),
        ("budget", "0.3", ["budget='0.3'", "a size"]),
        ("budget", -5, ["budget=-5", "at least 0 bytes"]),
        ("retries", "3.5", ["retries='3.5'", "whole number"]),
        ("retries", 3.5, ["retries=3.5", "whole number"]),
        ("retries", True, ["retries=True", "whole number"]),
        ("retries", "٣", ["whole number"]),
        ("retries", "11", ["retries='11'", "from 0 to 10"]),
        ("retries", "9" * 5000, ["retries=", "whole number"]),
        ("share", "half", ["share='half'", "a number"]),
        ("share", "", ["share=''", "a number"]),
        ("nodelay", "maybe", ["nodelay='maybe'", "true or false"]),
        ("bind", 5, ["bind=5", "text"]),
        ("style", "fanci", ["style='fanci'", "did you mean 'fancy'?", "plain, fancy"]),
        ("mode", "quick", ["mode='quick'", "fast, safe"]),
        ("certificate", 5, ["certificate=5", "a path"]),
    ],
)
def test_mistakes_name_parameter_value_and_remedy(name: str, value: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**{name: value})
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 300
    for part in parts:
        assert part in text


def test_unknown_parameter() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_parameters(Parameters, "net", {"heartbeet": "2"}, also=("rank",))
    text = str(caught.value)
    assert "net:// has no parameter 'heartbeet'; did you mean 'heartbeat'?" in text
    assert re.search(r"\bbudget\b.*\brank\b.*\bretries\b", text)
    with pytest.raises(ConfigError, match="lab:// has no parameter 'x'; it has no parameters"):
        parse_parameters(Nothing, "lab", {"x": "1"})


def test_labels_name_the_source() -> None:
    with pytest.raises(ConfigError, match="NET_RETRIES='x' is not a whole number"):
        parse_parameters(Parameters, "net", {"retries": "x"}, labels={"retries": "NET_RETRIES"})


def test_undeclared_fields_are_a_programming_error() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Careless:
        size: int = 3

    with pytest.raises(TypeError, match=r"'size' was not declared with param\(\)"):
        parse_parameters(Careless, "x", {})


def test_description() -> None:
    rows = {row.name: row for row in describe_parameters(Parameters)}
    assert list(rows) == [
        "heartbeat", "budget", "retries", "share", "nodelay", "bind", "style", "mode", "certificate",
    ]  # fmt: skip
    assert rows["heartbeat"] == ("heartbeat", "number", "10", "s", "silence that is still life")
    assert rows["style"].type == "plain|fancy"
    assert rows["mode"][1:3] == ("fast|safe", "fast")
    assert rows["nodelay"].default == "true"
    assert rows["certificate"][1:3] == ("path", "")


def test_merging() -> None:
    both = merge_parameters("Both", DelayParameters, Parameters)
    value = parse_parameters(both, "slow+net", {"delay_ms": "5", "retries": "1"})
    assert extract_parameters(DelayParameters, value) == DelayParameters(delay_ms=5.0)
    assert extract_parameters(Parameters, value) == Parameters(retries=1)
    assert len(describe_parameters(both)) == 10
    with pytest.raises(ConfigError, match="two layers declare the parameter 'delay_ms'"):
        merge_parameters("Twice", DelayParameters, DelayParameters)


@given(st.integers(0, 2**53 - 1))
def test_sizes_round_trip(size: int) -> None:
    assert parsed(budget=str(size)).budget == size
    assert parsed(budget=f"{size}k").budget == size * 1024


@given(st.text(max_size=20), st.sampled_from(["heartbeat", "budget", "retries", "share", "nodelay", "mode"]))
def test_any_text_is_a_value_or_a_config_error(text: str, name: str) -> None:
    message = name
    try:
        parsed(**{name: text})
    except ConfigError as error:
        message = str(error)
    assert name in message


def test_the_default_is_found_without_starting_mpi_or_importing_torch() -> None:
    code = (
        "import sys; from ruda_async.transport.registry import default_plugin; "
        "default_plugin(); default_plugin(network=True); "
        "print([m for m in ('torch', 'mpi4py') if m in sys.modules])"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
