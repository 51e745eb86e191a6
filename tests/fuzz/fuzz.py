"""Coverage-guided fuzzing of one target, by atheris (libFuzzer)::

    python tests/fuzz/fuzz.py link tests/fuzz/corpus/link -max_total_time=600

New input that reaches new code is added to the folder; what fails is written to ``crash-…``, and the exit
status is not 0. The arguments after the target are libFuzzer's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ruda_async", "ruda_tcp", "msgpack"], enable_loader_override=False):
    sys.path.insert(0, str(Path(__file__).parent))
    from targets import TARGETS


def main() -> None:
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
