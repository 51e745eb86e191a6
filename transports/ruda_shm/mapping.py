"""Shared mappings without a file descriptor.

`mmap.mmap` keeps a duplicate of the descriptor for as long as it lives (until Python 3.13 lets one say no),
and a rank maps more regions than a process may have files open.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

__all__ = ["map_shared"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def map_shared(descriptor: int, nbytes: int) -> memoryview:
    """The file's bytes, of format ``B``; unmapped with the last view of them.

    Raises:
        OSError: the kernel refuses.
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # At the end of the process the kernel does it: views may be looked at until then.
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    return memoryview(memory).cast("B")
