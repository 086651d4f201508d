"""Programmatic dependent launch: a kernel starts while the one before it still runs out.

On Hopper and later a grid may be put on the multiprocessors before its predecessor has ended; it
then waits for the predecessor's writes in `follow` (triton_kernels.py beside this). That hides the
microsecond between two launches, also within a CUDA graph. Triton launches of this package take
`**dependent(device)`; each of those kernels calls `follow` before it touches what others wrote.
"""

from __future__ import annotations

from functools import cache

import torch


def dependent(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel with a `PDL: tl.constexpr` parameter, for a device."""
    return _YES if generation(device) >= 9 else _NO


@cache
def sm_count(device: torch.device) -> int:
    """Return the multiprocessors of a CUDA device; a handful under Triton's interpreter."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def generation(device: torch.device) -> int:
    """Major number of a CUDA device's compute capability: 9 is Hopper's. 0 of what is none."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def raw_stream(device_index: int) -> int:
    """The handle of a device's current stream. ``torch.cuda.current_stream`` takes ten times as
    long, for an object around it."""
    return torch._C._cuda_getCurrentRawStream(device_index)


_YES = {"PDL": True, "launch_pdl": True}
_NO = {"PDL": False}
