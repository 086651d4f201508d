"""Encoders offline, from texts: vectors, classes and scores of pairs, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine_run.encoder_models import scores_of, states_of
from tests.llm.encoder_folders import TEXTS, encoder_folder

from tandem.llm import LLM, PoolingParams, pooled
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.pooling import PoolingTask

SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 3}


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Within a thousandth of each other's direction."""
    return bool(torch.cosine_similarity(got, want, 0) > 1 - 1e-3)


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("pooling", [None, "mean_tokens", "cls_token"])
def test_vectors_are_as_the_folder_says(name: str, pooling: str | None) -> None:
    """By sentence-transformers' files; without them of the first token, of length one."""
    folder, model, tokenizer = encoder_folder(name, pooling=pooling, normalize=pooling is not None)
    texts = TEXTS if name == "bert" else TEXTS[:2]
    with LLM(str(folder), **SETTINGS) as llm:
        vectors, tokens = llm.embed(texts), llm.encode(texts)
        with pytest.raises(InvalidParameter, match="a head for tokens"):
            llm.generate("a", use_tqdm=False)
    for text, vector, each in zip(texts, vectors, tokens, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert list(vector.prompt_token_ids) == ids
        states = states_of(model, ids)
        want = states.mean(0) if pooling == "mean_tokens" else states[0]
        got = torch.tensor(vector.outputs.embedding)
        assert close(got, want)
        assert got.norm() == pytest.approx(1, abs=1e-4)
        by_token = torch.tensor(each.outputs.data)
        assert all(map(close, by_token, states))


def test_a_batch_is_prepared_a_few_steps_ahead() -> None:
    """Not all of it before the first step: no more is in the engine than some steps hold, though
    there are places; answers are in order."""
    folder, model, _ = encoder_folder("bert")
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": 64, "max_num_batched_tokens": 128}
    prompts = [[5 + at, *range(6, 69)] for at in range(40)]
    with LLM(str(folder), **settings) as llm:
        core: Any = llm.engine._llm._client
        held, step = [], core._core.step

        def noted() -> Any:
            held.append(len(core._core.keys()))
            return step()

        core._core.step = noted
        vectors = llm.embed(prompts)
    assert 2 < max(held) <= pooled.STEPS_AHEAD * 128 // 64
    for prompt, vector in zip(prompts, vectors, strict=True):
        assert list(vector.prompt_token_ids) == prompt
        assert close(torch.tensor(vector.outputs.embedding), states_of(model, prompt)[0])


@pytest.mark.parametrize("name", ["bert-labels", "roberta-labels"])
def test_classes(name: str) -> None:
    folder, model, tokenizer = encoder_folder(name)
    with LLM(str(folder), **SETTINGS) as llm:
        classes = llm.classify(TEXTS[:2])
    for text, each in zip(TEXTS, classes, strict=False):
        want = scores_of(model, tokenizer(text)["input_ids"]).softmax(0)
        torch.testing.assert_close(torch.tensor(each.outputs.probs), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["bert-pairs", "xlm-roberta-pairs"])
def test_pairs_are_joined_and_typed_as_the_tokenizer_does(name: str) -> None:
    """A cross-encoder's scores: one text with each, both orders."""
    folder, model, tokenizer = encoder_folder(name)
    texts = TEXTS[:2] + TEXTS[3:]
    with LLM(str(folder), **SETTINGS) as llm:
        there = llm.score(texts[0], texts)
        back = llm.score(texts, [texts[1]] * len(texts), activation=False)
    for first, second, got, share in [
        *((texts[0], text, each, True) for text, each in zip(texts, there, strict=True)),
        *((text, texts[1], each, False) for text, each in zip(texts, back, strict=True)),
    ]:
        joined = tokenizer(first, second, return_token_type_ids=True)
        types = joined["token_type_ids"]
        at = types.index(1) if name.startswith("bert") else None
        want = scores_of(model, joined["input_ids"], at)
        want = want.sigmoid() if share else want
        assert got.outputs.score == pytest.approx(float(want), abs=1e-3)


def test_a_model_without_types_takes_none_and_a_position_is_checked() -> None:
    pair = PoolingParams(task=PoolingTask.EMBED, second_text_at=2)
    with LLM(str(encoder_folder("roberta")[0]), **SETTINGS) as llm:
        with pytest.raises(Exception, match=r"second_text_at: 2 .*no token types"):
            llm.embed(TEXTS[0], pair)
        with pytest.raises(InvalidParameter, match="second_text_at: 0 "):
            llm.embed(TEXTS[0], PoolingParams(second_text_at=0))


def test_every_position_may_be_filled_and_one_more_is_refused() -> None:
    """By ids: a prompt that is pooled needs no room for a token."""
    folder, model, _ = encoder_folder("bert")
    with LLM(str(folder), **SETTINGS) as llm:
        (whole,) = llm.embed([[7] * 128])
        with pytest.raises(InvalidParameter, match=r"129 tokens, but .* is 128 tokens"):
            llm.embed([[7] * 129])
    assert close(torch.tensor(whole.outputs.embedding), states_of(model, [7] * 128)[0])
