"""Selects a worker's attention backend: the configured one, or the first that is supported."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import device

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.attention.paged import PagedAttention
from tandem.kernels import Backend
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.layout import KVGroup

logger = logging.getLogger(__name__)

_CHOICES = {
    "cuda": (None, Backend.TORCH),
    "cpu": (Backend.TORCH,),
}
"""Backends by device type, in order; None lets each op take its own first choice."""


AUTO = "auto"


def select_backend(group: KVGroup, on: device, name: str = AUTO) -> AttentionBackend:
    """Return the backend called ``name``, or by ``auto`` the first that supports ``group`` on
    ``on``.

    Raises InvalidParameter with the reason, for a backend that is unknown or not supported.
    """
    refusals = []
    for backend in _candidates(group, on, name):
        support = backend.supports(group, on)
        if support.yes:
            logger.info("attention backend: %s", backend.name)
            return backend
        refusals.append(f"{backend.name}: {support.reason}")
    known = ", ".join(each.value for each in Backend)
    raise InvalidParameter("attention_backend", name, "; ".join(refusals) or f"one of {known}")


def _candidates(group: KVGroup, on: device, name: str) -> Iterator[AttentionBackend]:
    for choice in Backend if name != AUTO else _CHOICES.get(on.type, (Backend.TORCH,)):
        if name == AUTO or (choice is not None and choice.value == name):
            yield PagedAttention(group.head_dim, choice)
