"""Events of a parser, in the order of the text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Next part of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Next part of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Tool call whose name is known; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """Next part of the arguments of a call. All parts joined are JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """End of a call."""

    index: int


Event = ContentDelta | ReasoningDelta | CallBegun | ArgumentsDelta | CallEnded
