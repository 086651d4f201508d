"""Ctrl-C as tests have it: it comes when they say so, and is not mistaken for a user's."""

from collections.abc import Callable
from typing import Any

from tandem.llm.llm_engine import call


class Interrupted(BaseException):
    """What a signal raises here, as Ctrl-C raises KeyboardInterrupt."""


def interrupted_behind(count: int) -> Callable[..., Any]:
    """``call`` that raises Interrupted when the ``count``-th one is over."""
    left = count

    def interrupted(*args: Any) -> Any:
        nonlocal left
        result = call(*args)
        left -= 1
        if not left:
            raise Interrupted
        return result

    return interrupted
