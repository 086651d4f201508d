"""Masks that are late: rows draw later what they would have drawn, and nobody else sees of it."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.request import Request
from tandem.engine.scheduler.constrained import Constrained
from tandem.engine.structured import constraint
from tandem.llm import LLM, SamplingParams, StructuredOutputsParams

CHAT = [{"role": "user", "content": "Which city is the capital of France?"}]
REGEX = r"([A-Z][a-z]{1,12} ){4,9}[0-9]{3}"
TOKENS = 20
"""Of each answer: dozens of masks are late all the same."""


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
    """Tokens, and which were scored."""
    wanted = params()
    outputs = llm.chat([CHAT] * len(wanted), wanted, use_tqdm=False)
    said = [each.outputs[0] for each in outputs]
    return [
        (each.token_ids, [score.sampled.token_id for score in each.logprobs or ()]) for each in said
    ]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_late_rows_draw_the_same_later(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, executor: str
):
    """Some masks take longer than a step waits; tokens, scores and neighbours are as without."""
    settings: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 64}
    settings |= {"device": "cpu", "distributed_executor_backend": executor}
    make, take_back = constraint.make_mask, Constrained._take_back
    draw, late = random.Random(0), list[Request]()

    def slowly(*args: Any) -> bytearray:
        if draw.random() < 0.2:
            time.sleep(0.15)  # longer than a step takes here
        return make(*args)

    def counted(self: Constrained, request: Request, now: float) -> None:
        late.append(request)
        take_back(self, request, now)

    with LLM(str(smollm2), **settings) as llm:
        expected = answers(llm)
        monkeypatch.setattr(constraint, "make_mask", slowly)
        monkeypatch.setattr(Constrained, "_take_back", counted)
        found = answers(llm)
        texts = llm.chat([CHAT] * 4, params()[::2], use_tqdm=False)

    assert found == expected
    assert len(late) > 10
    assert all(re.match(r"([A-Z][a-z]{1,12} ){1,}", each.outputs[0].text) for each in texts)
