"""The embedded model answers in this process."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from tandem.llm import LLM, SamplingParams

pytestmark = pytest.mark.full


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


@pytest.mark.slow
def test_options_that_users_of_vllm_give(smollm2: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Prompt and text stand where they stand there; a permission that nothing needs is told of."""
    settings: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 64}
    settings |= {"tensor_parallel_size": 1, "dtype": "float32", "enforce_eager": True}
    settings |= {"block_size": 16, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4)
    prompts = ["Hello, my name is", "The capital of France is"]
    with (
        caplog.at_level(logging.WARNING, "tandem.llm"),
        LLM(model=str(smollm2), trust_remote_code=True, device="cpu", **settings) as llm,
    ):
        outputs = llm.generate(prompts, params, use_tqdm=False)

    assert [output.prompt for output in outputs] == prompts
    assert all(isinstance(output.outputs[0].text, str) for output in outputs)
    assert [each.message for each in caplog.records if "trust_remote_code" in each.message] == [
        "LLM(trust_remote_code=...) has no effect: a model's own code is not run"
    ]
