"""Classes, rewards, scores and vectors of tokens, offline, against transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine_run.tiny_models import SHAPE, temporary_folder

from tandem.llm import LLM, PoolingParams
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.pooling import PoolingTask

TEXTS = ["The capital of France is Paris.", "A cat sat on the mat.", "Paris " * 60]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 256,
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 3,
}


def classifier(smollm2: Path, num_labels: int) -> tuple[Path, Any]:
    """A folder of a random head over the embedded model's tokenizer, and transformers' model."""
    import transformers

    torch.manual_seed(num_labels)
    shape = {**SHAPE, "vocab_size": 49_152, "pad_token_id": 0, "num_labels": num_labels}
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**shape)).eval()
    folder = temporary_folder("tandem-labels-")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, folder)
    return folder, model


def scores_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        scores: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return scores


def test_classes_rewards_and_vectors(smollm2: Path) -> None:
    """In the order of the prompts, prompts longer than a step among them."""
    folder, model = classifier(smollm2, 3)
    with LLM(str(folder), **SETTINGS) as llm:
        classes, rewards, tokens = llm.classify(TEXTS), llm.reward(TEXTS), llm.encode(TEXTS)
        (alone,) = llm.encode(TEXTS[0], PoolingParams(task=PoolingTask.CLASSIFY))
        with pytest.raises(InvalidParameter, match="a model that embeds, or has one label"):
            llm.score(TEXTS[0], TEXTS)
        with pytest.raises(InvalidParameter, match="a head for tokens"):
            llm.generate(TEXTS[0], use_tqdm=False)
        with pytest.raises(InvalidParameter, match="embed, or encode"):
            llm.embed(TEXTS, PoolingParams(task=PoolingTask.CLASSIFY))
    for one, reward, each in zip(classes, rewards, tokens, strict=True):
        ids = list(one.prompt_token_ids)
        scores = scores_of(model, ids)
        torch.testing.assert_close(
            torch.tensor(one.outputs.probs), scores.softmax(0), rtol=1e-3, atol=1e-3
        )
        torch.testing.assert_close(torch.tensor(reward.outputs.probs), scores, rtol=1e-3, atol=1e-3)
        with torch.inference_mode():
            states = model.model(torch.tensor([ids])).last_hidden_state[0]
        got = torch.tensor(each.outputs.data)
        assert (torch.cosine_similarity(got, states, 1) > 1 - 1e-3).all()
    assert alone.outputs.data == pytest.approx(classes[0].outputs.probs, abs=1e-5)


def test_a_head_of_one_label_scores_pairs(smollm2: Path) -> None:
    """Both texts as the tokenizer joins them; one text with each, and pair by pair."""
    import transformers

    folder, model = classifier(smollm2, 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    with LLM(str(folder), **SETTINGS) as llm:
        one = llm.score(TEXTS[0], TEXTS)
        pairs = llm.score(TEXTS[:2], TEXTS[1:])
        raw = llm.score(TEXTS[0], TEXTS[1], activation=False)
        with pytest.raises(InvalidParameter, match="as many as in text_2"):
            llm.score(TEXTS[:2], TEXTS)
    wanted = [scores_of(model, tokenizer(TEXTS[0], text)["input_ids"]) for text in TEXTS]
    for got, want in zip(one, wanted, strict=True):
        assert got.outputs.score == pytest.approx(float(want.sigmoid()), abs=1e-3)
    second = scores_of(model, tokenizer(TEXTS[1], TEXTS[2])["input_ids"])
    assert pairs[0].outputs.score == pytest.approx(float(wanted[1].sigmoid()), abs=1e-3)
    assert pairs[1].outputs.score == pytest.approx(float(second.sigmoid()), abs=1e-3)
    assert raw[0].outputs.score == pytest.approx(float(wanted[1]), abs=1e-2)


@pytest.mark.full
@pytest.mark.slow
def test_without_a_head_scores_are_cosines(smollm2: Path) -> None:
    """Of the vectors that ``embed`` gives; a text with itself is one."""
    with LLM(str(smollm2), dtype="float32", **SETTINGS) as llm:
        vectors = [torch.tensor(each.outputs.embedding) for each in llm.embed(TEXTS)]
        scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS)]
        with pytest.raises(InvalidParameter, match="no classification head"):
            llm.classify(TEXTS)
        with pytest.raises(InvalidParameter, match="no head"):
            llm.score(TEXTS[0], TEXTS[1], activation=False)
    assert scores == pytest.approx([float(vectors[0] @ each) for each in vectors], abs=1e-3)
    assert scores[0] == pytest.approx(1, abs=1e-3)
