"""Perplexity of real models in each form of weights and of KV, before their speed counts.

``pytest -s`` prints the table of docs/performance.md. The text is this project's pages.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pytest
from gemma3 import IS_INSTALLED, WHY_SKIPPED, prepared_gemma
from tests.dense_model import write_dense_model
from tests.engine_run.form_models import write_form

from tandem.llm import LLM, SamplingParams

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1800)]
PAGES = Path(__file__).parents[2] / "docs"
TOKENS, PIECE = 1024, 512
EIGHT, FOUR = 1.05, 1.5
"""Maximum of the perplexity over that of float32. Codes of 4 bits are the nearest ones here, while
the tools of real checkpoints calibrate them."""
FORMS = {
    "float-block": EIGHT,
    "float-channel": EIGHT,
    "fp8-tensor": EIGHT,
    "int8": EIGHT,
    "packed-8": EIGHT,
    "awq": FOUR,
    "gptq-v2-ordered": FOUR,
    "packed": FOUR,
    "mxfp4": FOUR,
    "nvfp4": FOUR,
}


class Model(NamedTuple):
    """A real model."""

    name: str
    packed: Path
    """Folder with the blocks of its GGUF file."""
    dense: Path
    exact: list[tuple[float, int]]
    """``scores`` of ``dense``."""


def scores(folder: Path, **settings) -> list[tuple[float, int]]:
    """Log-probability of each token of the text, and the most likely token at its place."""
    text = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with LLM(str(folder), enable_prefix_caching=False, dtype="float32", **settings) as llm:
        ids = llm.get_tokenizer().encode(text)[:TOKENS]
        prompts = [{"prompt_token_ids": ids[at : at + PIECE]} for at in range(0, TOKENS, PIECE)]
        return [
            (at.sampled.logprob, at.top[0].token_id)
            for output in llm.generate(prompts, asked, use_tqdm=False)
            for at in output.prompt_logprobs or ()
            if at is not None
        ]


def perplexity(found: list[tuple[float, int]]) -> float:
    return math.exp(-sum(each for each, _ in found) / len(found))


@pytest.fixture(
    scope="module",
    params=[
        "SmolLM2 135M",
        pytest.param(
            "Gemma 3 270M", marks=pytest.mark.skipif(not IS_INSTALLED, reason=WHY_SKIPPED)
        ),
    ],
)
def model(request, smollm2, dense_smollm2, tmp_path_factory) -> Model:
    """One of the models, with its scores in float32."""
    packed, dense = smollm2, dense_smollm2
    if request.param.startswith("Gemma"):
        packed = prepared_gemma().path
        dense = write_dense_model(packed, tmp_path_factory.mktemp("dense") / "gemma")
    found = scores(dense)
    print(f"\n| {request.param} | float32 | {perplexity(found):.2f} | 1 | 1 |")
    return Model(request.param, packed, dense, found)


def judge(model: Model, form: str, found: list[tuple[float, int]], most: float) -> None:
    ratio = perplexity(found) / perplexity(model.exact)
    pairs = zip(found, model.exact, strict=True)
    same = sum(one[1] == other[1] for one, other in pairs) / len(found)
    print(f"\n| {model.name} | {form} | {perplexity(found):.2f} | {ratio:.4f} | {same:.3f} |")
    assert ratio <= most


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_weights_costs_little(model, form):
    judge(model, form, scores(write_form(form, model.dense)[0]), FORMS[form])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fp8 at load", {"quantization": "fp8"}),
        ("KV fp8", {"kv_cache_dtype": "fp8"}),
        ("both", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ],
)
def test_a_setting_costs_little(model, name, settings):
    judge(model, name, scores(model.dense, **settings), EIGHT)


def test_packed_blocks_of_a_file_cost_nothing(model):
    """Decoded weights are the same numbers."""
    judge(model, "GGUF blocks", scores(model.packed), 1.0001)
