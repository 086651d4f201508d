"""What a parser tells of a text, in the order of the text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of what the model says to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool whose name is known; its arguments follow."""

    index: int
    """From 0, over the calls of one answer."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments: all of them joined are JSON, unless the model broke off."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """Nothing follows for this call."""

    index: int


Event = ContentDelta | ReasoningDelta | CallBegun | ArgumentsDelta | CallEnded
