"""Programmatic dependent launch: a kernel starts while the one before it ends.

On Hopper and later it then waits for the predecessor's writes in `follow` (triton_kernels.py). That
hides the time between two launches. Launches take `**dependent(device)`; their kernels call
`follow` before they access other kernels' writes.
"""

from __future__ import annotations

from functools import cache

import torch


def dependent(device: torch.device) -> dict[str, bool]:
    """Return launch arguments of a kernel with a `PDL: tl.constexpr` parameter, for a device."""
    return _YES if generation(device) >= 9 else _NO


@cache
def sm_count(device: torch.device) -> int:
    """Return the multiprocessors of a CUDA device; a few under Triton's interpreter."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def generation(device: torch.device) -> int:
    """Return the major compute capability of a CUDA device (9 is Hopper's); 0 for other devices."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def raw_stream(device_index: int) -> int:
    """Return the handle of a device's current stream, faster than ``torch.cuda.current_stream``."""
    return torch._C._cuda_getCurrentRawStream(device_index)


_YES = {"PDL": True, "launch_pdl": True}
_NO = {"PDL": False}
