"""The embedded model answers in this process."""

import math
from pathlib import Path
from typing import Any

import pytest

from tandem.llm.offline import LLM


@pytest.mark.slow
def test_every_token_of_the_vocabulary_is_scored(smollm2: Path) -> None:
    """-1 asks for all, and their probabilities are one together."""
    settings: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 64}
    params = {"temperature": 0, "max_tokens": 1, "logprobs": -1, "prompt_logprobs": -1}
    with LLM(str(smollm2), device="cpu", max_logprobs=-1, **settings) as llm:
        output = llm.generate("The capital", params, use_tqdm=False)[0]
        size = llm.card.vocab_size

    assert output.outputs[0].logprobs is not None
    assert output.prompt_logprobs is not None
    for position in (output.outputs[0].logprobs[0], output.prompt_logprobs[1]):
        assert position is not None
        assert len(position.top) == size
        assert math.fsum(math.exp(each.logprob) for each in position.top) == pytest.approx(
            1, abs=1e-3
        )


@pytest.mark.slow
def test_the_embedded_model_knows_the_capital_of_france(smollm2: Path) -> None:
    """Chat template, tokenizer, engine, real weights and text, end to end; twice by its cache."""
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    params = {"temperature": 0, "max_tokens": 24}
    with LLM(str(smollm2), device="cpu", max_model_len=512, num_gpu_blocks_override=64) as llm:
        first = llm.chat(chat, params, use_tqdm=False)[0]
        again = llm.chat([chat, chat], params, use_tqdm=False)

    assert "Paris" in first.outputs[0].text
    assert {output.outputs[0].text for output in again} == {first.outputs[0].text}
    assert all(output.num_cached_tokens for output in again)
