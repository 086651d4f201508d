"""Vectors of prompts, offline, by a small model."""

from pathlib import Path

import pytest
import torch

from tandem.llm import LLM, PoolingParams
from tandem.protocol.errors import InvalidParameter

pytestmark = pytest.mark.full

TEXTS = ["The capital of France is Paris.", "A cat sat on the mat.", "Paris " * 60, "Hi"]


@pytest.mark.slow
def test_vectors_are_transformers_last_hidden_states(small: Path) -> None:
    """By the last token and by the mean, in the order of the prompts, chunks among them."""
    import transformers

    model = transformers.AutoModel.from_pretrained(small, dtype=torch.float32).eval()
    mean = PoolingParams(pooling_type="mean", normalize=False)  # type: ignore[arg-type]
    with LLM(
        str(small),
        device="cpu",
        dtype="float32",
        max_model_len=512,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=96,
        max_num_seqs=3,
    ) as llm:
        lasts, means = llm.embed(TEXTS), llm.embed(TEXTS, mean)
        (alone,) = llm.embed(TEXTS[0])
        with pytest.raises(InvalidParameter, match="pooling_type"):
            llm.embed(TEXTS, PoolingParams(pooling_type="max"))  # type: ignore[arg-type]
        answer = llm.generate(TEXTS[0], {"max_tokens": 1, "temperature": 0}, use_tqdm=False)

    assert len(answer) == 1
    for text, last, of_all in zip(TEXTS, lasts, means, strict=True):
        ids = list(last.prompt_token_ids)
        assert ids == list(of_all.prompt_token_ids), text
        with torch.inference_mode():
            states = model(torch.tensor([ids])).last_hidden_state[0]
        for got, want in ((last, states[-1]), (of_all, states.mean(0))):
            vector = torch.tensor(got.outputs.embedding)
            assert torch.cosine_similarity(vector, want, 0) > 1 - 1e-3
        assert torch.tensor(last.outputs.embedding).norm() == pytest.approx(1, abs=1e-4)
        assert torch.tensor(of_all.outputs.embedding).norm() == pytest.approx(
            float(states.mean(0).norm()), rel=1e-2
        )
    assert alone.outputs.embedding == pytest.approx(lasts[0].outputs.embedding, abs=1e-3)
