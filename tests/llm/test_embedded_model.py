"""The embedded model answers in this process."""

from pathlib import Path

import pytest

from tandem.llm.offline import LLM


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
