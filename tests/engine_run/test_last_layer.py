"""The last layer: KV of every token, and queries, o and MLP of the wanted tokens alone."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from tests.engine_run.run_driver import Driver
from tests.engine_run.tiny_models import folder_of, judged

from tandem.engine.models import registry
from tandem.engine.models.decoder import MLP
from tandem.engine.quant.dense import DenseMethod
from tandem.kernels.rotary_kv import rotary_kv, rotary_q
from tandem.protocol.sampling import SamplingParams

LAYERS, HEADS, KV_HEADS = 3, 6, 2
FORMS = ["dense", "of the CPU"]
"""Of weights: one that can be cut, and the one that a CPU takes, which as a rule cannot."""


def prompt(length: int) -> list[int]:
    """A prompt of the tiny models, by its length."""
    return [(7 * i + length) % 300 + 5 for i in range(length)]


@dataclass
class Step:
    """What one step asked for, and how far it was from the same step over all queries."""

    wanted: int
    queries: list[int] = field(default_factory=list)
    """Of each call of attention."""
    heads: list[int] = field(default_factory=list)
    """Given to each call of ``rotary_kv``."""
    alone: list[int] = field(default_factory=list)
    """Queries that were rotated without keys."""
    mlp: list[int] = field(default_factory=list)
    """Rows of each layer's MLP."""
    gap: float = 0.0
    kv_gap: float = 0.0


class Watched:
    """A driver each of whose steps is run over all queries first, and then as it is."""

    def __init__(self, monkeypatch, name: str, form: str, **settings) -> None:
        if form == "dense":
            monkeypatch.setattr(registry, "select_method", lambda *_: DenseMethod())
        self.driver = Driver(folder_of(name), **settings)
        self.driver.runner.kv_cache.memory.zero_()
        self.steps: list[Step] = []
        of_runner = type(self.driver.runner)
        self._hidden = of_runner.hidden
        monkeypatch.setattr(of_runner, "hidden", lambda _, inputs, *_beside: self._both(inputs))
        imported = "tandem.engine.models.decoder"
        monkeypatch.setattr(f"{imported}.rotary_kv", self._noting(rotary_kv, "heads", 1))
        monkeypatch.setattr(f"{imported}.rotary_q", self._noting(rotary_q, "alone", 0))
        monkeypatch.setattr(MLP, "__call__", self._noting(MLP.__call__, "mlp", 0, at=1))
        backend = type(self.driver.runner.attention)
        attend = self._noting(backend.forward, "queries", 0, at=1)
        monkeypatch.setattr(backend, "forward", attend)

    def _noting(self, call, what: str, dim: int, at: int = 0):
        def noted(*args):
            getattr(self.steps[-1], what).append(args[at].shape[dim])
            return call(*args)

        return noted

    def _both(self, inputs):
        runner, memory = self.driver.runner, self.driver.runner.kv_cache.memory
        kind = runner.kv_cache.layers[0].dtype
        before = memory.clone()
        self.steps.append(Step(-1))
        of_all = replace(inputs, sequences=replace(inputs.sequences, logits_rows=None))
        want, written = self._hidden(runner, of_all), memory.clone()
        memory.copy_(before)
        self.steps[-1] = Step(len(want))
        got = self._hidden(runner, inputs)
        assert got.shape == want.shape
        step = self.steps[-1]
        step.gap = (got - want).abs().amax().item() if len(want) else 0.0
        step.kv_gap = (memory.view(kind) - written.view(kind)).abs().amax().item()
        assert not torch.equal(memory, before)
        return got


def run_mixed(watched: Watched) -> list[Step]:
    """Whole prompts, chunks after a cached context, decodes among them, a chunk alone."""
    driver = watched.driver
    a, b, c = (driver.add(prompt(n)) for n in (41, 70, 100))
    driver.step((a, 41))
    driver.step((a, 1), (b, 33))
    driver.step((a, 1), (b, 37), (c, 20))
    driver.step((c, 30))
    driver.step((b, 1), (a, 1), (c, 50))
    driver.step((a, 1), (c, 1))
    return watched.steps


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama", "llama-untied-biased", "qwen2", "qwen3"])
def test_the_last_layer_asks_for_the_wanted_queries_alone(monkeypatch, name, form):
    """The result is that of all queries; what is not wanted is not computed, its KV is."""
    watched = Watched(monkeypatch, name, form)
    steps = run_mixed(watched)
    assert [step.wanted for step in steps] == [1, 1, 2, 0, 3, 2]
    tokens = [41, 34, 58, 30, 52, 2]
    for step, count in zip(steps[:-1], tokens, strict=False):
        most = [count] * (LAYERS - 1)
        asked = [step.wanted] if step.wanted else []
        assert step.mlp == most + asked
        assert step.queries == most + asked
        if form == "dense":
            assert step.heads == [HEADS + 2 * KV_HEADS] * (LAYERS - 1) + [2 * KV_HEADS]
            assert step.alone == [step.wanted]
    assert steps[-1].heads == [HEADS + 2 * KV_HEADS] * LAYERS
    assert max(step.gap for step in steps) < 1e-4
    assert max(step.kv_gap for step in steps) < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_tokens_in_16_bits_are_of_the_same_hidden_states(monkeypatch, form):
    """The stream is float32 beside weights of 16 bits; results differ by their roundings."""
    steps = run_mixed(Watched(monkeypatch, "qwen3", form, dtype="bfloat16"))
    assert [step.wanted for step in steps] == [1, 1, 2, 0, 3, 2]
    assert max(step.gap for step in steps) < 0.1
    assert max(step.kv_gap for step in steps) < 0.1


@pytest.mark.parametrize("name", ["llama-untied-biased", "qwen2-yarn", "qwen3"])
def test_a_form_that_can_be_cut_draws_transformers_tokens(monkeypatch, name):
    """Mixed steps of decodes and odd chunks, as a GPU's weights take them."""
    driver = Watched(monkeypatch, name, "dense").driver
    prompts = [prompt(n) for n in (1, 7, 33, 70)]
    seqs = [driver.add(each) for each in prompts]
    got = driver.generate(seqs, 6, budget=23)
    assert got == [judged(name, each, 6)[0] for each in prompts]


def test_scored_prompts_ask_for_every_query(monkeypatch):
    """Where other tokens than rows' last ones are wanted, all queries are computed."""
    watched = Watched(monkeypatch, "qwen3", "dense")
    driver = watched.driver
    scored = driver.add(prompt(40), SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0))
    driver.step((driver.add(prompt(9)), 9), (scored, 40))
    (step,) = watched.steps
    assert step.wanted == 2 + 39
    assert step.queries == [49] * LAYERS
    assert step.alone == []
