"""Errors of the kernels, raised by the typed wrappers before any backend runs."""

from __future__ import annotations


class BadTensor(ValueError):
    """The op does not take the tensor; the text names it, its value and what is allowed."""


class NoBackend(LookupError):
    """The op has no backend of that name, or none for that device."""
