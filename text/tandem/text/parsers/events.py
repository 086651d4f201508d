"""Events of a parser, in the order of the text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Tool call whose name is known; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments, which joined are JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """End of a call."""

    index: int


Event = ContentDelta | ReasoningDelta | CallBegun | ArgumentsDelta | CallEnded
