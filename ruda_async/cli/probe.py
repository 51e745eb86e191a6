"""One rank of the doctor's self-test.

    python -m ruda_async.cli.probe URL

is that for ranks that another engine has started; others are started by `ruda_async.launch.spawn`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from ..errors import RudaError

__all__ = ["LIMIT", "MARK", "probe"]

#: Seconds that one transport's self-test may take.
LIMIT = 30.0
#: What rank 0's line begins with, among whatever an engine prints.
MARK = "ruda-async probe: "
_WARM_UP, _ROUNDS = 20, 200


def probe(url: str | None = None) -> tuple[float, list[str]]:
    """Seconds per 8-byte all-reduce between two ranks, and what links were taken.

    The latter for a transport that chooses: the schemes under ``links`` of its `Transport.describe`.

    Raises:
        RudaError: they did not connect, or summed wrongly.
    """
    import numpy as np

    from .. import sync

    with sync.connect(url, timeout=LIMIT) as comm:
        if comm.world_size != 2:
            raise RudaError(f"there are {comm.world_size} ranks instead of 2")
        seconds = []
        for i in range(_WARM_UP + _ROUNDS):
            value = np.array([comm.rank + i], np.float64)
            start = time.perf_counter()
            total = comm.all_reduce_sum(value)
            seconds.append(time.perf_counter() - start)
            if total.item() != 2 * i + 1:
                raise RudaError(f"all_reduce_sum of {i} and {i + 1} gave {total.item():g}", rank=comm.rank)
        found = statistics.median(seconds[_WARM_UP:]), list(comm.describe()["transport"].get("links", ()))
        if url is not None and comm.rank == 0:
            print(MARK + json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    probe(sys.argv[1])
