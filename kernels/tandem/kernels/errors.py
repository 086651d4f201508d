"""Errors of the kernels.

    KernelError
    ├── BadTensor      a tensor of the wrong shape, dtype, device or stride (a ValueError too)
    └── NoBackend      no backend of an op runs there (a LookupError too)

Raised by the typed wrappers before any backend runs; a backend itself assumes checked input.
"""

from __future__ import annotations


class KernelError(Exception):
    """Anything that tandem.kernels raises on purpose."""


class BadTensor(KernelError, ValueError):
    """A tensor that the op cannot take; the text names it, its value and what is allowed."""


class NoBackend(KernelError, LookupError):
    """The op has no backend of that name, or none for that device."""
