"""Chats that are too long, made to fit by leaving out their oldest turns (``truncation: auto``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from tandem.text.errors import ContextLengthExceeded

_Prepared = TypeVar("_Prepared")
Prepare = Callable[[Sequence[dict[str, Any]]], Awaitable[_Prepared]]


async def fitting(messages: Sequence[dict[str, Any]], prepare: Prepare[_Prepared]) -> _Prepared:
    """Return the result of ``prepare`` for the longest end of the chat that fits.

    That end begins with a message of the user; instructions at the beginning stay. Raises
    ContextLengthExceeded if not even the last turn fits. Makes one try for each halving of the
    number of turns.
    """
    try:
        return await prepare(messages)
    except ContextLengthExceeded as error:
        too_long = error
    start = next((at for at, each in enumerate(messages) if not _instructs(each)), 0)
    begins = [at for at, each in enumerate(messages) if at > start and each.get("role") == "user"]
    found: _Prepared | None = None
    low, high = 0, len(begins)
    while low < high:
        middle = (low + high) // 2
        try:
            found = await prepare([*messages[:start], *messages[begins[middle] :]])
            high = middle
        except ContextLengthExceeded as error:
            too_long, low = error, middle + 1
    if found is None:
        raise too_long
    return found


def _instructs(message: dict[str, Any]) -> bool:
    return message.get("role") in ("system", "developer")
