"""Peak rates of devices by NVIDIA's data sheets; shares of steps (MFU, MBU) are relative to them.

A peak has the dense operations of 16-bit products a second (float32 by TF32 is less, fp8 up to
twice as many), and the bytes a second of the device's memory. A device that is not listed has no
shares, only counters.
"""

from __future__ import annotations

from typing import NamedTuple


class Peak(NamedTuple):
    """Peak rates of one device."""

    flops: float
    bytes_per_s: float


_PEAKS = (
    ("B200", Peak(2.25e15, 8.0e12)),
    ("H200", Peak(989e12, 4.8e12)),
    ("GH200", Peak(989e12, 4.0e12)),
    ("H100 NVL", Peak(835e12, 3.9e12)),
    ("H100 PCIe", Peak(756e12, 2.0e12)),
    ("H100", Peak(989e12, 3.35e12)),
    ("H20", Peak(148e12, 4.0e12)),
    ("A100-SXM4-80GB", Peak(312e12, 2.039e12)),
    ("A100-SXM4-40GB", Peak(312e12, 1.555e12)),
    ("A100 80GB PCIe", Peak(312e12, 1.935e12)),
    ("L40S", Peak(362e12, 0.864e12)),
    ("L4", Peak(121e12, 0.3e12)),
)
"""Peaks by a part of the driver's name of the device; whole words: L4 does not match L40S."""


def peak_of(device_name: str) -> Peak | None:
    """Return the peak of the device with that driver's name; None for an unknown one, or a CPU."""
    words = f" {device_name} "
    longest = sorted(_PEAKS, key=lambda entry: -len(entry[0]))
    return next((peak for name, peak in longest if f" {name} " in words), None)
