"""Comparison of products with the reference on a model's own shapes, before any is served.

A kernel may be wrong for one shape, driver or compiler. An op whose result differs is replaced by
plain torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.registry import Backend, Op, ops

logger = logging.getLogger(__name__)

LARGEST = 0.1
"""Maximum difference, as part of the reference's norm: rounded activations make some 0.04."""


@contextmanager
def comparing(device: torch.device) -> Iterator[list[str]]:
    """Compare each product in the block with the reference.

    At the end of the block, ops with a wrong kernel run the reference from then on. The list has
    their names.
    """
    wrong: list[str] = []
    products = [each for each in ops().values() if each.product and Backend.TORCH in each.backends]
    fast = {op.name: op.on(device) for op in products}
    for op in products:
        if fast[op.name] is not op.load(Backend.TORCH):
            op.use(device, partial(_compared, op, fast[op.name], wrong))
    try:
        yield wrong
    finally:
        for op in products:
            op.use(device, op.load(Backend.TORCH) if op.name in wrong else fast[op.name])


def _compared(
    op: Op[Callable[..., object]], fast: Callable[..., object], wrong: list[str], *args: Any
) -> object:
    """Return the result of the fast function, or the reference's if it differs or cannot run."""
    copies = [each.clone() if at == op.writes else each for at, each in enumerate(args)]
    before = None if op.writes is None else args[op.writes].clone()
    wanted = op.load(Backend.TORCH)(*copies)
    right = wanted if op.writes is None else copies[op.writes]
    assert isinstance(right, Tensor)
    found: object = wanted
    try:
        found = fast(*args)
        fault = _fault(found if op.writes is None else args[op.writes], right, before)
    except Exception as error:  # such as a kernel that does not build with this compiler
        fault = f"cannot run ({error})"
    if fault is None:
        return found
    if op.writes is not None:
        args[op.writes].copy_(right)
    if op.name not in wrong:
        wrong.append(op.name)
        shapes = ", ".join(str(list(each.shape)) for each in args if isinstance(each, Tensor))
        text = "%s: the kernel for %s %s; plain torch runs instead, and is slower"
        logger.warning(text, op.name, shapes, fault)
    return wanted


def _fault(found: object, right: Tensor, before: Tensor | None) -> str | None:
    """Return what is wrong with a result, or None; ``before`` is what it was added to."""
    assert isinstance(found, Tensor)
    added = right.float() if before is None else right.float() - before
    part = float((found.float() - right.float()).norm() / added.norm().clamp(min=1e-30))
    if not right.numel() or part <= LARGEST:
        return None
    return f"differs from plain torch by {part:.3g} of its norm"
