"""A family that nobody knew: its class, and its own attention and MLP where they differ."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from tests.engine_run.run_driver import Driver
from tests.engine_run.tiny_models import folder_of, judged

from tandem.engine.config import EngineConfig, families
from tandem.engine.config.families import Family
from tandem.engine.models.registry import DecoderBuilder
from tandem.protocol.errors import InvalidParameter

PROMPT = [7, 11, 13, 17, 19, 23]


@dataclass(frozen=True, slots=True)
class SwappedBuilder(DecoderBuilder):
    """The same layers, made by a family's own methods."""

    def attention(self, index, prefix):
        MADE.append(prefix)
        return DecoderBuilder.attention(self, index, prefix)

    def mlp(self, prefix):
        MADE.append(prefix)
        return DecoderBuilder.mlp(self, prefix)


MADE: list[str] = []


def load(facts, weights):
    return SwappedBuilder.of(facts, weights).build()


class Swapped(Family):
    """Refuses a window, and has a builder of its own."""

    architectures = ("SwappedForCausalLM",)
    defaults: ClassVar = {"head_dim": 16}
    layers = __name__
    keys = frozenset({"normed_heads"})

    def facts(self, config):
        return {"qk_norm": bool(config["normed_heads"])}

    def check(self, facts):
        super().check(facts)
        if facts.sliding_window is not None:
            raise InvalidParameter("config.json: sliding_window", facts.sliding_window, "null")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Weights of a Qwen3 under a name that only the new family knows."""
    monkeypatch.setitem(families.FAMILIES, "SwappedForCausalLM", Swapped())
    source = folder_of("qwen3")
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["SwappedForCausalLM"], "normed_heads": True, "head_dim": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    MADE.clear()
    return tmp_path


def test_a_family_is_its_class_and_builds_its_own_layers(folder):
    """Keys of its config.json, defaults, and builders of attention and MLP are the family's."""
    driver = Driver(folder)
    assert driver.generate([driver.add(PROMPT)], 6) == [judged("qwen3", PROMPT, 6)[0]]
    assert MADE[:2] == ["model.layers.0.self_attn", "model.layers.0.mlp"]
    assert len(MADE) == 6


def test_a_family_refuses_what_its_layers_do_not_compute(folder):
    """Its check runs before weights are loaded."""
    facts = EngineConfig.of(folder, device="cpu").facts
    assert facts.head_dim == 16
    with pytest.raises(InvalidParameter, match="sliding_window"):
        families.check_servable(replace(facts, sliding_window=64))
    with pytest.raises(InvalidParameter, match="hidden_act"):
        families.check_servable(replace(facts, hidden_act="gelu"))
