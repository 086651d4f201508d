"""Time for grammars, in tests that show what follows from them.

A grammar that is not compiled in seconds, or a mask that is not made by then, is an error by the
clock on the wall: on a machine that does a hundred other things it says nothing of the grammar.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tandem.engine.scheduler import constrained
from tandem.engine.structured import manager, process

SECONDS = 100.0
"""Less than a test gets, so that it fails with words."""


@contextmanager
def time_for_grammars() -> Iterator[None]:
    """Engines of this process wait as long as a test may for what is compiled, and for masks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager.StructuredOutputManager, "seconds", SECONDS)
        patch.setattr(constrained, "MASK_SECONDS", SECONDS)
        for name in ("LOAD_SECONDS", "COMPILE_SECONDS", "TURN_SECONDS", "FOLLOW_SECONDS"):
            patch.setattr(process, name, SECONDS)
        yield
