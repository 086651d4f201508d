"""Detection of answers that begin within reasoning."""

from __future__ import annotations

from tandem.text.parsers.tables import ReasoningFormat


def is_open(reasoning: ReasoningFormat, prompt: str, continued: str = "") -> bool:
    """Return whether an answer to ``prompt`` begins within reasoning.

    ``continued``, the text of a message that it continues, decides alone if given.
    """
    if continued.strip():
        opened = max(continued.rfind(each.rstrip()) for each in reasoning.opens)
        return opened > continued.rfind(reasoning.close)
    end = prompt.rstrip()
    if any(end.endswith(each.rstrip()) for each in reasoning.opens):
        return True
    return reasoning.starts_open and not end.endswith((reasoning.close, *reasoning.answered))


def behind_marks(reasoning: ReasoningFormat, continued: str) -> str:
    """Return the text of a message after its last mark."""
    for mark in (*reasoning.opens, reasoning.close):
        continued = continued.rpartition(mark.rstrip())[2]
    return continued.strip()
