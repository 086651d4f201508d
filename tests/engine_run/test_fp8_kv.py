"""KV in fp8: tokens by every path are those over keys and values rounded to codes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.group_driver import GroupDriver
from tests.engine_run.tiny_models import folder_of, judged

from tandem.engine.config import EngineConfig
from tandem.engine.config.kv_scales import digest_of
from tandem.engine.models import decoder
from tandem.engine.ranks import Ranks
from tandem.engine.worker.kv_cache import KVCacheMemory
from tandem.kernels.narrow.codes import from_codes, to_codes
from tandem.kernels.rotary_kv import rotary_kv
from tandem.protocol.card import Fingerprint
from tandem.protocol.errors import InvalidParameter

PROMPTS = (1, 2, 16, 33, 150)
COUNT = 6
FAMILIES = ["llama", "qwen3", "gemma3", "qwen3_5"]
K_SCALES, V_SCALES = [0.041, 0.033], [0.051, 0.043]
"""Scales that are not powers of two, one of each KV head."""


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in PROMPTS]


def heads_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["num_key_value_heads"])


def scales_of(heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.tensor((each * heads)[:heads]) for each in (K_SCALES, V_SCALES))
    return k, v


def with_scales(name: str, to: Path, **tensors: torch.Tensor) -> Path:
    """Return a copy of a model's folder with more tensors, of which {} is the layer's number."""
    source = folder_of(name)
    shutil.copytree(source, to)
    (file,) = to.glob("*.safetensors")
    weights = load_file(file)
    layers = {each.split("layers.")[1].split(".")[0] for each in weights if "self_attn" in each}
    prefix = "model." if any(each.startswith("model.") for each in weights) else ""
    for layer in layers:
        for key, value in tensors.items():
            weights[f"{prefix}layers.{layer}.self_attn.{key.replace('__', '.')}"] = value.clone()
    save_file(weights, file, metadata={"format": "pt"})
    return to


def scaled_folder(name: str, to: Path) -> Path:
    k, v = scales_of(heads_of(folder_of(name)))
    return with_scales(name, to, k_scale=k, v_scale=v)


def round_pages(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """Have pages of the model's type hold what codes of these scales stand for."""
    scales = torch.stack(scales_of(heads))[:, :, None]

    def rounded(qkv, kv, rotation, slots, qk_norm, kv_scales):
        assert kv_scales is None
        q = rotary_kv(qkv, kv, rotation, slots, qk_norm)
        places = kv.permute(0, 3, 1, 2, 4)
        at = slots.blocks, slots.offsets
        places[at] = from_codes(to_codes(places[at], scales), torch.float32) * scales
        return q

    monkeypatch.setattr(decoder, "rotary_kv", rounded)


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_decodes_and_a_second_pass_see_the_rounded_keys_and_values(
    name, tmp_path, monkeypatch
):
    """Prompts of one chunk, of several, and preempted ones; with the scales of the checkpoint.

    A sum in another order may round a number to the next code, which is little to what all lose.
    """
    folder = scaled_folder(name, tmp_path / "scaled")
    plain = [judged(name, prompt, COUNT)[1] for prompt in prompts()]
    found = []
    for budget in (8, 23, 400):
        driver = GroupDriver(folder, num_blocks=96, kv_cache_dtype="fp8", dtype="float32")
        seqs = [driver.add(prompt) for prompt in prompts()]
        tokens = driver.generate(seqs, COUNT, budget=budget)
        found.append((tokens, [driver.logits(seq)[:COUNT] for seq in seqs]))
        if budget == 23:
            again = driver.preempt(seqs[-1])
            more = driver.generate([again], COUNT + 3, budget=budget)
            longer = GroupDriver(folder, num_blocks=96, kv_cache_dtype="fp8", dtype="float32")
            assert more == longer.generate([longer.add(prompts()[-1])], COUNT + 3, budget=400)
    with monkeypatch.context() as patched:
        round_pages(patched, heads_of(folder))
        driver = GroupDriver(folder, num_blocks=96, dtype="float32")
        seqs = [driver.add(prompt) for prompt in prompts()]
        wanted = driver.generate(seqs, COUNT, budget=400)
        logits = [driver.logits(seq)[:COUNT] for seq in seqs]
    for tokens, of_run in found:
        assert tokens == wanted
        for got, want, exact in zip(of_run, logits, plain, strict=True):
            assert float((got[0] - want[0]).norm()) < 0.05 * float((want[0] - exact[0]).norm())


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_cached_prefixes_draw_the_same_tokens(name, tmp_path):
    folder = scaled_folder(name, tmp_path / "scaled")
    settings: dict[str, Any] = {"kv_cache_dtype": "fp8", "dtype": "float32"}
    wide = CPUEngine(folder, num_gpu_blocks_override=200, **settings)
    wanted = wide.generate(prompts(), COUNT)
    assert wide.generate(prompts(), COUNT) == wanted
    assert max(wide.cached.values()) == 144
    chunks = CPUEngine(folder, num_gpu_blocks_override=200, max_num_batched_tokens=64, **settings)
    assert chunks.generate(prompts(), COUNT) == wanted


def test_codes_come_back_from_host_memory_as_they_were(tmp_path):
    """Over a cache that is too small for all of the requests."""
    folder = scaled_folder("llama", tmp_path / "scaled")
    settings: dict[str, Any] = {"kv_cache_dtype": "fp8", "dtype": "float32"}
    asked = [[(11 * each + 7 * at) % 300 + 5 for at in range(60)] for each in range(5)]
    wanted = CPUEngine(folder, num_gpu_blocks_override=200, **settings).generate(asked, 40)
    small = CPUEngine(
        folder, num_gpu_blocks_override=14, kv_offloading_size=0.01, max_num_batched_tokens=48,
        **settings,
    )  # fmt: skip
    for _ in range(2):
        assert small.generate(asked, 40) == wanted
    tier = small.core._offload
    assert tier is not None
    assert tier.stats.hit_tokens > 0
    small.core.check_integrity()


def test_scales_are_read_by_each_of_their_names(tmp_path):
    """One number, or one of each head, of any float type; a missing one is 1."""
    heads = heads_of(folder_of("llama"))
    one = torch.tensor(0.25)
    cases = {
        "own": {"k_scale": one, "v_scale": one.view(1).bfloat16()},
        "outputs": {"k_proj__output_scale": one.half(), "v_proj__output_scale": one.double()},
        "heads": {"k_scale": one.expand(heads), "v_scale": one.view(1, 1, 1)},
        "both": {"k_scale": one, "k_proj__output_scale": 2 * one, "v_scale": one},
    }
    found = [
        EngineConfig.of(with_scales("llama", tmp_path / name, **tensors), device="cpu").kv_scales
        for name, tensors in cases.items()
    ]
    assert found[0][0] == ((0.25,) * heads, (0.25,) * heads)
    assert all(each == found[0] for each in found)
    only = EngineConfig.of(with_scales("llama", tmp_path / "k", k_scale=one), device="cpu")
    assert only.kv_scales[1] == ((0.25,) * heads, (1.0,) * heads)
    assert EngineConfig.of(folder_of("llama"), device="cpu").kv_scales == {}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor(0.0), "k_scale: 0.0' is not allowed; scales above 0"),
        (torch.tensor(torch.inf), "k_scale: inf"),
        (torch.ones(3), r"k_scale of shape \[3\]' is not allowed; one number, or one of each of"),
        (torch.ones(1, dtype=torch.int32), "k_scale of type I32"),
    ],
)
def test_scales_that_are_none_are_refused(value, words, tmp_path):
    folder = with_scales("llama", tmp_path / "bad", k_scale=value)
    with pytest.raises(InvalidParameter, match=words):
        EngineConfig.of(folder, device="cpu")


def test_a_rank_has_the_scales_of_its_heads(tmp_path):
    folder = scaled_folder("llama", tmp_path / "scaled")
    config = EngineConfig.of(folder, device="cpu", kv_cache_dtype="fp8", tensor_parallel_size=2)
    whole = torch.stack(scales_of(heads_of(folder)))
    for rank, part in enumerate(whole.chunk(2, 1)):
        memory = KVCacheMemory(
            config.layer_groups, 2, torch.device("cpu"), scales=config.kv_scales,
            ranks=Ranks(rank, 2),
        )  # fmt: skip
        assert all(torch.equal(each, part) for each in memory.scales.values())
        assert set(memory.scales) == set(range(len(memory.layers)))


def test_scales_and_types_are_part_of_a_fingerprint(tmp_path):
    """Blocks of unlike ones have unlike keys. Types alone may be handed over, scales may not."""
    one = scaled_folder("llama", tmp_path / "one")
    other = with_scales("llama", tmp_path / "other", k_scale=torch.tensor(0.5))

    def fingerprint(folder: Path, **settings: Any) -> Fingerprint:
        made = EngineConfig.of(folder, device="cpu", revision="r", dtype="float32", **settings)
        return made.fingerprint()

    plain, codes = fingerprint(one), fingerprint(one, kv_cache_dtype="fp8")
    unlike = fingerprint(other, kv_cache_dtype="fp8")
    bare = fingerprint(folder_of("llama"), kv_cache_dtype="fp8")
    assert len({each.digest for each in (plain, codes, unlike, bare)}) == 4
    assert plain.compatibility == codes.compatibility
    assert len({each.compatibility for each in (codes, unlike, bare)}) == 3
    scales = EngineConfig.of(one, device="cpu").kv_scales
    assert digest_of(scales) != digest_of({0: scales[0]})


def test_two_engines_with_other_scales_draw_other_tokens(tmp_path):
    """The scales reach the kernels: pages are no wider than a byte, and coarse ones lose more."""
    fine = scaled_folder("llama", tmp_path / "fine")
    coarse = with_scales("llama", tmp_path / "coarse", k_scale=torch.tensor(1e-3),
                         v_scale=torch.tensor(1e-3))  # fmt: skip
    found = {}
    for name, folder in (("fine", fine), ("coarse", coarse)):
        driver = GroupDriver(folder, kv_cache_dtype="fp8", dtype="float32")
        seqs = [driver.add(prompt) for prompt in prompts()]
        driver.generate(seqs, 1, budget=400)
        found[name] = driver.logits(seqs[-1])[0]
        assert driver.runner.kv_cache.layers[0].dtype == torch.float8_e4m3fn
    exact = judged("llama", prompts()[-1], 1)[1][0]
    lost = {name: float((each - exact).norm()) for name, each in found.items()}
    assert lost["coarse"] > 4 * lost["fine"] > 0
