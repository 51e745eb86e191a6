"""``ruda-async run -n 4 examples/serve_moe``, where the folder is the program; or ``python -m serve_moe``."""

from __future__ import annotations

import sys
from pathlib import Path

folder = Path(__file__).resolve().parent
# Run as a program, the folder itself is on the path; its modules are those of a package beside digits_moe.
sys.path[:] = [str(folder.parent), *(place for place in sys.path if Path(place or ".").resolve() != folder)]

from serve_moe.rank import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main())
