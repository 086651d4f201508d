"""Prompts of embeddings given to an LLM in this process: tensors, arrays and safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import rows
from safetensors.torch import save as save_safetensors
from tests.engine_run.embedded import table_of

from tandem.llm import LLM
from tandem.protocol.errors import InvalidParameter

pytestmark = pytest.mark.full

PARAMS = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
ROW = rows()[9]


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(
        str(smollm2), device="cpu", num_gpu_blocks_override=60, enable_prompt_embeds=True
    ) as made:
        yield made


def test_whatever_holds_the_vectors(llm: LLM, smollm2: Path) -> None:
    """One batch of a tensor, a batch of one, an array, a safetensors file, and ids."""
    table = table_of(smollm2)[ROW.prompt]
    parameter = torch.nn.Parameter(table)
    forms: list[object] = [table, table[None], parameter, table.numpy()]
    forms += [save_safetensors({"p": table}), np.asfortranarray(table.numpy())]
    prompts: list[Any] = [*({"prompt_embeds": each} for each in forms), ROW.prompt]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    for each in outputs:
        assert list(each.outputs[0].token_ids) == ROW.tokens[:8]
    assert {each.outputs[0].text for each in outputs} == {outputs[-1].outputs[0].text}
    assert [each.is_embeds for each in outputs] == [True] * 6 + [False]
    assert list(outputs[0].prompt_token_ids) == [0] * len(ROW.prompt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(llm: LLM, smollm2: Path, dtype: torch.dtype) -> None:
    table = table_of(smollm2)[ROW.prompt].to(dtype)
    prompts = [{"prompt_embeds": table}, {"prompt_embeds": table.float()}]
    one, two = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3, 5), "576 values each"),
        (torch.zeros(576), r"\[positions, hidden_size\]"),
        (torch.zeros(3, 576, dtype=torch.float64), "float32, float16, bfloat16"),
        (torch.zeros(0, 576), "one whole vector or more"),
        (torch.full((3, 576), torch.nan), "finite values"),
        (torch.zeros(3, 576).to_sparse(), "dense"),
        (b"no tensor", "one tensor in a safetensors file"),
        (b"PK\x03\x04 of torch.save", r"convert it with safetensors\.torch\.save"),
        ([[0.0]], "a tensor, or bytes of a safetensors file"),
    ],
)
def test_what_is_none_is_named(llm: LLM, value: object, words: str) -> None:
    """Before anything of the batch runs."""
    with pytest.raises(InvalidParameter, match=words) as caught:
        llm.generate({"prompt_embeds": value}, PARAMS, use_tqdm=False)
    assert caught.value.param.endswith("prompt_embeds")


def test_vectors_are_made_of_texts_alone(llm: LLM) -> None:
    given = {"prompt_embeds": torch.zeros(3, 576)}
    with pytest.raises(InvalidParameter, match="nothing is pooled of embeddings"):
        llm.embed(given)
    with pytest.raises(InvalidParameter, match="one of prompt, prompt_token_ids and prompt_embeds"):
        llm.generate({**given, "prompt": "Hi"}, PARAMS, use_tqdm=False)


def test_without_the_setting(smollm2: Path) -> None:
    """The words say what to do."""
    with (
        LLM(str(smollm2), device="cpu", num_gpu_blocks_override=20) as made,
        pytest.raises(InvalidParameter, match="--enable-prompt-embeds"),
    ):
        made.generate({"prompt_embeds": torch.zeros(3, 576)}, PARAMS, use_tqdm=False)
