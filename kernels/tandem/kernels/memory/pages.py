"""Pages under a host tensor, given back to the system; their addresses stay.

A holder of the tensor, or of its address, may go on with it afterwards: the memory exists again,
all zero, as it is touched. Mappings of other processes to read it stay.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cache

from torch import Tensor

from tandem.protocol.errors import TandemError

_DONTNEED, _REMOVE = 4, 9
"""MADV_DONTNEED of memory of one's own, MADV_REMOVE of shared memory, whose file keeps it else."""


class PagesKept(TandemError):
    """The system does not take the pages back; the text has the reason."""


def give_back(tensor: Tensor) -> int:
    """Give back the whole pages under a dense tensor of the host; how many bytes they are.

    Its content is lost: zero in these pages. Raises PagesKept for memory that was shared with
    other processes to be read (``shared.SharedMemory.share``), whose seal forbids it, and where the
    system refuses.
    """
    assert tensor.is_contiguous(), "pages are given back of dense memory"
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    if end <= begin:
        return 0
    failed = _advise(begin, end - begin, _REMOVE)
    if failed == errno.EPERM:
        raise PagesKept("the memory is shared with other processes, which may read it")
    if failed:  # no shared memory
        failed = _advise(begin, end - begin, _DONTNEED)
    if failed:
        raise PagesKept(f"the system keeps the pages: {os.strerror(failed)}")
    return end - begin


def _advise(address: int, size: int, advice: int) -> int:
    """Return the error's number; 0 for success."""
    status = _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice))
    return ctypes.get_errno() if status else 0


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
