"""Every family against transformers on the same folder, through the whole run half."""

import random
from dataclasses import replace

import pytest
import torch
from tests.engine_run.run_driver import Driver
from tests.engine_run.tiny_models import MODELS, folder_of, judge_of, judged

from tandem.engine.config import EngineConfig
from tandem.engine.layers.rotary import Rotary
from tandem.engine.loader import LoadError, open_weights
from tandem.engine.models import load_model
from tandem.protocol.errors import InvalidParameter

PROMPTS = (1, 7, 16, 33, 70)
COUNT = 8


def prompts() -> list[list[int]]:
    """One prompt of each length, the same every time."""
    rng = random.Random(3)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in PROMPTS]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_tokens_equal_transformers(name, block_size):
    """Mixed steps of decodes and odd chunks draw the tokens that transformers draws one by one."""
    driver = Driver(folder_of(name), block_size=block_size)
    seqs = [driver.add(prompt) for prompt in prompts()]
    got = driver.generate(seqs, COUNT, budget=23)
    assert got == [judged(name, prompt, COUNT)[0] for prompt in prompts()]


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name):
    """Logits of prompt and decode steps differ from transformers' by rounding only."""
    driver = Driver(folder_of(name))
    worst = 0.0
    for prompt in prompts():
        seq = driver.add(prompt)
        driver.ear.heard.clear()
        driver.generate([seq], COUNT, budget=11)
        want = judged(name, prompt, COUNT)[1]
        worst = max(worst, (torch.cat(driver.ear.heard) - want).abs().max().item())
    assert worst < 2e-4


@pytest.mark.parametrize("name", ["llama", "granite", "olmo2", "starcoder2"])
def test_bfloat16_stays_near_float32(name):
    """The half type runs through every op, and its logits are those that float32 gives over the
    same rounded weights, to its precision."""
    for prompt in prompts():
        driver = Driver(folder_of(name), dtype="bfloat16")
        driver.generate([driver.add(prompt)], 1)
        want = judged(name, prompt, 1, torch.bfloat16)[1]
        gap = (driver.ear.heard[0] - want).norm() / want.norm()
        assert gap < 0.05


@pytest.mark.parametrize("name", ["llama", "llama-linear", "llama-dynamic", "llama3", "qwen2-yarn"])
def test_angles_equal_transformers(name):
    """cos and sin of every rope kind are transformers' at positions over the whole context."""
    facts = EngineConfig.of(folder_of(name), device="cpu").facts
    rotary = Rotary(facts, dtype=torch.float32, device=torch.device("cpu"))
    positions = torch.arange(0, facts.max_position_embeddings, 7)
    theirs = judge_of(name).model.rotary_emb
    cos, sin = theirs(torch.zeros(1), positions[None])
    got = rotary(positions)
    torch.testing.assert_close(got.cos, cos[0])
    half = facts.head_dim // 2
    torch.testing.assert_close(got.sin * torch.tensor([-1.0] * half + [1.0] * half), sin[0])


def test_dynamic_angles_beyond_the_trained_length():
    """A token past it takes the frequencies of the sequence that ends with it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = judge_of("llama-dynamic").config
    facts = EngineConfig.of(folder_of("llama-dynamic"), device="cpu").facts
    rotary = Rotary(facts, dtype=torch.float32, device=torch.device("cpu"))
    for position in (511, 512, 900):
        inverse, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, None, seq_len=position + 1)
        got = rotary(torch.tensor([position])).cos[0, : len(inverse)]
        torch.testing.assert_close(got, (position * inverse).cos(), atol=1e-4, rtol=1e-4)


def test_models_that_are_not_served_are_named():
    """An unknown architecture, activation or rope kind is refused with what is served."""
    config = EngineConfig.of(folder_of("llama"), device="cpu")

    def load(**changes):
        with open_weights(config, progress=False) as weights:
            return load_model(replace(config.facts, **changes), weights)

    with pytest.raises(InvalidParameter, match=r"GPTJForCausalLM.*one of LlamaForCausalLM"):
        load(architecture="GPTJForCausalLM")
    with pytest.raises(InvalidParameter, match="hidden_act"):
        load(hidden_act="gelu")
    with pytest.raises(InvalidParameter, match="rope_type"):
        load(rope=type(config.facts.rope)(kind="longrope"))
    with pytest.raises(InvalidParameter, match="low_freq_factor"):
        load(rope=type(config.facts.rope)(kind="llama3", scaling={"factor": 8.0}))
    with pytest.raises(LoadError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(attention_bias=True)
