"""Readers of bytes from the network, against any bytes: a kept corpus, hypothesis, and atheris where it is.

`targets.py` says what is fuzzed, `fuzz.py` runs one target for as long as wanted. Continuous integration runs
`tox -e fuzz`, in which atheris has a minute.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).parent
CORPUS = FOLDER / "corpus"

_spec = importlib.util.spec_from_file_location("fuzz_targets", FOLDER / "targets.py")
assert _spec is not None
assert _spec.loader is not None
fuzz_targets = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fuzz_targets)
TARGETS, SEEDS = fuzz_targets.TARGETS, fuzz_targets.CORPUS_SEEDS


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_corpus(name: str) -> None:
    files = sorted((CORPUS / name).iterdir())
    assert files
    for file in files:
        TARGETS[name](file.read_bytes())


def test_the_corpus_has_the_seeds() -> None:
    """So that the format's changes reach it: rewrite it by ``python tests/fuzz/test_fuzz.py``."""
    for name, seed in SEEDS:
        assert any(file.read_bytes() == seed for file in (CORPUS / name).iterdir()), name


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_any_bytes(name: str) -> None:
    seeds = [seed for target, seed in SEEDS if target == name]

    @given(st.data())
    def check(data: st.DataObject) -> None:
        body = bytearray(data.draw(st.sampled_from(seeds)))
        for _ in range(data.draw(st.integers(0, 4))):
            at = data.draw(st.integers(0, len(body)))
            cut = data.draw(st.integers(0, 40))
            body[at : at + cut] = data.draw(st.binary(max_size=40))
        TARGETS[name](bytes(body))

    check()


@pytest.mark.parametrize("kind", range(1, 10))
def test_frames_that_are_sound_and_make_no_sense(kind: int) -> None:
    """Right checksums around wrong contents, which mutations hardly find."""
    from ruda_async.transport import wire

    numbers = st.sampled_from(
        [0, 1, 3, 4, 5, 8, 200, 256, 257, 500, 1000, 4096, 1 << 20, 1 << 40, (1 << 62) - 1]
    )
    frames = st.lists(
        st.tuples(
            st.just(kind) | st.integers(1, 9),
            numbers,
            numbers,
            st.integers(0, 3),
            st.integers(0, 3),
            st.booleans(),
        ),
        max_size=12,
    )

    @given(st.booleans(), frames)
    def check(checked: bool, found: list[tuple[int, int, int, int, int, bool]]) -> None:
        body = bytearray(b"\xff" if checked else b"\0")
        for kind, tag, nbytes, ident, flags, long in found:
            sized = kind in (wire.MESSAGE, wire.OFFER, wire.DATA, wire.CREDIT)
            body += wire.encode(kind, tag, nbytes if sized else 0, b"h" * (kind % 2), ident, flags)
            body += bytes(min(nbytes, 1000) if long else 0)
        TARGETS["link"](bytes(body))

    check()


def fuzz(name: str, seconds: int, folder: Path) -> None:
    pytest.importorskip("atheris", reason="pip install 'ruda-async[fuzz]'")
    run = subprocess.run(
        [
            sys.executable,
            str(FOLDER / "fuzz.py"),
            name,
            str(folder),
            str(CORPUS / name),
            f"-max_total_time={seconds}",
            "-rss_limit_mb=2048",
            "-timeout=20",
            f"-artifact_prefix={folder}/",
        ],
        capture_output=True,
        text=True,
        timeout=seconds + 120,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "Done " in run.stderr


@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.timeout(200)
def test_guided_fuzzing_for_a_minute_in_all(name: str, tmp_path: Path) -> None:
    fuzz(name, -(-60 // len(TARGETS)), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_two_minutes_of_guided_fuzzing(name: str, tmp_path: Path) -> None:
    fuzz(name, 120, tmp_path)


if __name__ == "__main__":
    for target, seed in SEEDS:
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"seed-{sum(t == target for t, _ in SEEDS[: SEEDS.index((target, seed))])}").write_bytes(
            seed
        )
