"""Masks that are late: rows draw later what they would have drawn, and nobody else sees of it."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.engine_run.patience import time_for_grammars
from tests.engine_run.test_drafts import DRAFTS

from tandem.engine.request import Request
from tandem.engine.scheduler.constrained import Constrained
from tandem.engine.structured import constraint
from tandem.engine.structured.backends.base import Grammar
from tandem.llm import LLM, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.full

CHAT = [{"role": "user", "content": "Which city is the capital of France?"}]
REGEX = r"([A-Z][a-z]{1,12} ){4,9}[0-9]{3}"
TOKENS = 14
"""Of each answer: dozens of masks are late all the same."""
WAIT_SECONDS = 5.0
"""For a step that goes without a mask; less than a request may wait for one."""


class Late:
    """Some masks are made when a step has gone without them: by what steps do, and by no clock, as
    a step may take as long as one likes."""

    def __init__(self) -> None:
        self.count = 0
        """Rows that a step went without."""
        self._make, self._unpin = constraint.make_mask, Constrained._unpin
        self._draw = random.Random(0)
        self._without: Counter[int] = Counter()
        """Steps that went without the mask that is being made, by its grammar."""
        self._passed: set[int] = set()
        """Grammars whose requests are not planned before their masks are made."""
        self._changed = threading.Condition()

    def make(self, grammar: Grammar, *rest: Any) -> bytearray:
        with self._changed:
            draw = self._draw.random()
            if draw < 0.25:
                self._changed.wait_for(lambda: self._without[id(grammar)] > 0, WAIT_SECONDS)
            elif draw < 0.5:
                self._changed.wait_for(lambda: id(grammar) in self._passed, WAIT_SECONDS)
            self._without.pop(id(grammar), None)
            self._passed.discard(id(grammar))
        return self._make(grammar, *rest)

    def unpin(self, owner: Constrained, request: Request, now: float) -> None:
        """A step went without a request's mask."""
        assert isinstance(request.constraint, constraint.Constraint)
        with self._changed:
            self._unpin(owner, request, now)
            self.count += 1
            self._without[id(request.constraint._grammar)] += 1
            if request.seq in owner._late:
                self._passed.add(id(request.constraint._grammar))
            self._changed.notify_all()


def params() -> list[SamplingParams]:
    """Every other one under a grammar; some look back at their tokens, some are scored."""
    bound = StructuredOutputsParams(regex=REGEX)
    more: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "top_p": 0.9, "logprobs": 2},
        {"seed": 3, "repetition_penalty": 1.3},
    ]
    made = []
    for each in more:
        made.append(SamplingParams(max_tokens=TOKENS, structured_outputs=bound, **each))
        made.append(SamplingParams(max_tokens=TOKENS, ignore_eos=True, **each))
    return made


def answers(llm: LLM) -> list[Any]:
    """Tokens, and which were scored; those under the grammar begin as it says."""
    wanted = params()
    outputs = llm.chat([CHAT] * len(wanted), wanted, use_tqdm=False)
    said = [each.outputs[0] for each in outputs]
    assert all(re.match(r"([A-Z][a-z]{1,12} ){1,}", each.text) for each in said[::2])
    return [
        (each.token_ids, [score.sampled.token_id for score in each.logprobs or ()]) for each in said
    ]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["uni", pytest.param("mp", marks=pytest.mark.nightly)])
def test_late_rows_draw_the_same_later(small: Path, monkeypatch: pytest.MonkeyPatch, executor: str):
    """Some masks take longer than a step waits; tokens, scores and neighbours are as without."""
    settings: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 64}
    settings |= {"device": "cpu", "distributed_executor_backend": executor}
    settings |= {"speculative_config": DRAFTS}  # rows without a grammar have some, too
    late = Late()

    with time_for_grammars(), LLM(str(small), **settings) as llm:
        expected = answers(llm)
        monkeypatch.setattr(constraint, "make_mask", late.make)
        monkeypatch.setattr(Constrained, "_unpin", lambda *args: late.unpin(*args))
        found = answers(llm)

    assert found == expected
    assert late.count > 10
