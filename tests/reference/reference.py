"""The reference tokens and the one excuse for not meeting them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TIE = 1e-4
"""Gap of the two best logits below which either token is right."""
NEAR = 0.05
"""Gap from which on, in 16 bits, it is looked into whether rounding explains the other token."""


@dataclass(frozen=True)
class Row:
    prompt: list[int]
    tokens: list[int]
    gaps: list[float]

    def cut(self, count: int) -> Row:
        """The same prompt with no more than ``count`` tokens to come."""
        return Row(self.prompt, self.tokens[:count], self.gaps[:count])

    def verdict(self, tokens: list[int]) -> str:
        """``equal``, ``excused`` (parted where two logits tie), or what differs where."""
        for position, (ours, theirs) in enumerate(zip(tokens, self.tokens, strict=False)):
            if ours != theirs:
                if self.gaps[position] < TIE:
                    return "excused"
                return (
                    f"prompt of {len(self.prompt)}: token {position} is {ours}, transformers has "
                    f"{theirs} by {self.gaps[position]:g}"
                )
        return "equal" if len(tokens) == len(self.tokens) else f"{len(tokens)} tokens came"


@cache
def rows(model: str = "smollm2") -> tuple[Row, ...]:
    """All 64, shortest prompt first: of ``smollm2``, or of the ``small`` one of random weights."""
    folder = Path(__file__).parent
    content = json.loads((folder / f"{model}_greedy.json").read_text())
    if model == "smollm2":
        return tuple(Row(**row) for row in content["rows"])
    pairs = zip(rows(), content["rows"], strict=True)
    return tuple(Row(prompt=same.prompt, **row) for same, row in pairs)


def judge(
    answers: dict[int, list[int]], count: int = 64, model: str = "smollm2"
) -> tuple[list[str], int]:
    """Differences that nothing excuses, and how many were excused; by index of the row, of whose
    tokens ``count`` were asked for."""
    found = rows(model)
    verdicts = [found[index].cut(count).verdict(tokens) for index, tokens in answers.items()]
    wrong = [verdict for verdict in verdicts if verdict not in ("equal", "excused")]
    return wrong, verdicts.count("excused")
