"""GGUF blocks in an engine: served packed, and equal to the decoded model."""

from __future__ import annotations

import logging
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.dense_model import dense_tensors, write_dense_model
from tests.engine_run.run_driver import Driver
from tests.hub.conftest import blocks_of, write_gguf
from torch.nn import functional

from tandem.engine.config import EngineConfig
from tandem.engine.config.quantization import GgufScheme, quantization_of
from tandem.engine.config.quantization.gguf import BLOCKS
from tandem.engine.loader import (
    INPUTS,
    OUTPUTS,
    LoadError,
    SafetensorsWeights,
    Shard,
    open_weights,
)
from tandem.engine.models import load_model
from tandem.engine.models.decoder import MLP, Attention, Decoder, Layer
from tandem.engine.quant import LinearPart, Product
from tandem.engine.quant.base import SideBySide
from tandem.engine.quant.blocks import Backends, BlockProduct
from tandem.engine.quant.dense import KINDS, DenseMethod, PackedMethod
from tandem.engine.quant.gguf import GgufMethod, dense_of
from tandem.engine.quant.tables import table_of
from tandem.engine.ranks import ALONE, Ranks
from tandem.hub import prepare
from tandem.hub.gguf.tensors import PACKED
from tandem.kernels import Backend, NoBackend
from tandem.kernels.packed_gemm import FORMS, PACKED_LINEAR_ADD, Packed
from tandem.protocol.errors import InvalidParameter

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 2, 3, 7], [1, 8] * 20, [3]]
MIXED = {"blk.0.attn_v.weight": "Q6_K", "blk.0.ffn_down.weight": "Q6_K"}
"""Kinds that differ from Q4_K, as in files of Q4_K_M."""


def mixed() -> dict[str, Any]:
    """Return arguments of ``write_gguf`` for parts of unlike kinds."""
    low, high = blocks_of("Q4_K"), blocks_of("Q6_K")
    tensors = {name: high["tensors"][name] for name in MIXED}
    return {**low, "kinds": MIXED, "tensors": low["tensors"] | tensors}


@cache
def folders(kind: str) -> tuple[Path, Path]:
    """Return the prepared folder of a GGUF file of one kind or ``mixed``, and the same model
    decoded."""
    place = Path(mkdtemp(prefix="tandem-gguf-"))
    changes = mixed() if kind == "mixed" else blocks_of(kind)
    file = write_gguf(place / "tiny.gguf", "llama", **changes)
    folder = prepare(str(file), cache_dir=place / "cache", progress=False).path
    return folder, write_dense_model(folder, place / "dense")


def judged(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return the greedy tokens of transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([prompt + found])).logits[0, -1]
            found.append(int(logits.argmax()))
    return found


def model_of(folder: Path, **settings: Any) -> Decoder:
    config = EngineConfig.of(folder, device="cpu", **settings)
    with open_weights(config, progress=False) as weights:
        model = load_model(config.facts, weights)
    assert isinstance(model, Decoder)
    return model


def test_the_engine_multiplies_the_kinds_that_the_hub_keeps() -> None:
    assert BLOCKS.keys() == PACKED
    assert {kind: FORMS[kind] for kind in BLOCKS} == BLOCKS


@pytest.mark.parametrize("kind", [*sorted(BLOCKS), "mixed"])
def test_tokens_and_logits_are_those_of_the_decoded_model(kind: str) -> None:
    """Steps of prompts and of decodes, a tied head, and q and k in rotary order."""
    packed, dense = folders(kind)
    heard, said = [], []
    for folder in (packed, dense):
        driver = Driver(folder)
        said.append(driver.generate([driver.add(each) for each in PROMPTS], 8, budget=23))
        heard.append(torch.cat(driver.ear.heard))
    assert said[0] == said[1] == [judged(dense, each, 8) for each in PROMPTS]
    torch.testing.assert_close(heard[0], heard[1], rtol=1e-4, atol=1e-4)


def parts_of(product: Product) -> tuple[Packed, ...]:
    assert isinstance(product, BlockProduct)
    return product._weights.parts


def test_weights_stay_in_the_file() -> None:
    """The products read the mapped file: no part of a matrix is copied or decoded at load."""
    packed, _ = folders("mixed")
    model = model_of(packed)
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    assert isinstance(layer.attention, Attention)
    qkv = layer.attention.qkv._product
    assert isinstance(qkv, SideBySide)
    parts = [part for each in qkv._products for part in parts_of(each)]
    assert [part.kind for part in parts] == ["Q4_K", "Q4_K", "Q6_K"]
    assert isinstance(layer.mlp, MLP)
    products = [layer.attention.out._product, layer.mlp.down._product]
    products.append(model.embedding._table.product())
    found = [*parts, *(part for each in products for part in parts_of(each))]
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if str(packed) in line]
    for part in found:
        at = part.blocks.data_ptr()
        assert any(int(first, 16) <= at < int(end, 16) for first, end in spans)


def test_an_engine_in_bfloat16_rounds_once() -> None:
    packed, dense = folders("Q8_0")
    heard = []
    for folder in (packed, dense):
        driver = Driver(folder, dtype="bfloat16")
        driver.generate([driver.add(PROMPTS[0])], 1)
        heard.append(torch.cat(driver.ear.heard))
    torch.testing.assert_close(heard[0], heard[1], rtol=0.1, atol=0.1)


def test_dummies_of_a_gguf_model_are_plain() -> None:
    driver = Driver(folders("Q4_K")[0], load_format="dummy")
    driver.generate([driver.add(PROMPTS[0])], 3)
    assert torch.cat(driver.ear.heard).isfinite().all()


def test_dense_weights_are_the_blocks_decoded_in_the_order_of_parts() -> None:
    """A GPU gets these, in the engine's type."""
    packed, _ = folders("mixed")
    tensors, want = load_file(packed / "model.safetensors"), dense_tensors(packed)
    names = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv"]
    kinds = ("Q4_K", "Q4_K", "Q6_K")
    parts = [Packed(tensors[name], kind) for name, kind in zip(names, kinds, strict=True)]
    got = dense_of(parts, torch.bfloat16)
    assert torch.equal(got, torch.cat([want[name] for name in names]).bfloat16())


def source_of(folder: Path, ranks: Ranks = ALONE) -> SafetensorsWeights:
    return SafetensorsWeights(folder, dtype=torch.float32, device=CPU, progress=False, ranks=ranks)


def test_a_rank_loads_its_part_of_a_matrix() -> None:
    """Any outputs can be cut, and inputs between blocks."""
    packed, _ = folders("Q4_K")
    weight = dense_tensors(packed)["model.layers.0.mlp.down_proj.weight"]
    x = torch.randn(3, 512)
    want = x @ weight.T
    method = GgufMethod(GgufScheme("Q4_K", *BLOCKS["Q4_K"]), DenseMethod())
    with source_of(packed) as source:

        def part(rank: int, count: int, dim: int) -> Product:
            shard = Shard(rank, count, dim)
            name = "model.layers.0.mlp.down_proj"
            return method.load(source, [LinearPart(name, (512, 512), shard=shard)])

        outputs = torch.cat([part(rank, 4, OUTPUTS)(x) for rank in range(4)], 1)
        torch.testing.assert_close(outputs, want, rtol=1e-4, atol=1e-4)
        halves = [part(rank, 2, INPUTS)(x[:, rank * 256 :][:, :256]) for rank in range(2)]
        torch.testing.assert_close(sum(halves), want, rtol=1e-4, atol=1e-4)
        with pytest.raises(LoadError, match=r"down_proj.*512 cannot be cut.*multiple of 256"):
            part(0, 4, INPUTS)


def test_the_last_rank_of_a_table_is_filled_with_zeros() -> None:
    packed, _ = folders("Q4_1")
    name, ranks = "model.embed_tokens.weight", Ranks(2, 3)
    facts = EngineConfig.of(packed, device="cpu").facts
    with source_of(packed, ranks) as source:
        shard = source.shard(OUTPUTS, uneven=True)
        table = table_of(facts.quantization, DenseMethod(), source, name, (10, 64), shard)
    want = dense_tensors(packed)[name]
    assert torch.equal(table.lookup(torch.tensor([1, 0])), want[[9, 8]])
    got = table.product()(torch.eye(64))
    torch.testing.assert_close(got.T, torch.cat((want[8:], torch.zeros(2, 64))))


@pytest.mark.parametrize("first", [0, 10, 40])
def test_a_product_is_cut_between_any_outputs(first: int) -> None:
    """Also across parts, in the same memory and with its bias."""
    parts = [Packed(tensor_of("Q8_0", outputs), "Q8_0") for outputs in (30, 18)]
    whole = BlockProduct(parts, torch.randn(48), Backends())
    x = torch.randn(2, 64)
    cut = whole.part(slice(first, 45))
    torch.testing.assert_close(cut(x), whole(x)[:, first:45])


def tensor_of(kind: str, outputs: int) -> torch.Tensor:
    blocks = blocks_of(kind)["tensors"]["blk.0.ffn_up.weight"]
    return torch.from_numpy(blocks[:outputs])


def test_a_wrong_product_is_named_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(x: torch.Tensor, weights: object, y: torch.Tensor) -> None:
        y.add_(1.0)

    monkeypatch.setitem(PACKED_LINEAR_ADD._loaded, Backend.LLVM, wrong)
    packed, dense = folders("Q4_0")
    with caplog.at_level(logging.WARNING):
        driver = Driver(packed)
    assert "Q4_0: LLVM's product of 1 rows differs from the reference" in caplog.text
    got = driver.generate([driver.add(PROMPTS[0])], 4)
    assert got == [judged(dense, PROMPTS[0], 4)]


def test_a_product_that_cannot_be_compiled_is_named_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent(*_: object) -> None:
        raise NoBackend("no OpenMP library")

    monkeypatch.setitem(PACKED_LINEAR_ADD._loaded, Backend.LLVM, absent)
    product = BlockProduct([Packed(tensor_of("Q4_1", 8), "Q4_1")], None, Backends())
    assert "Q4_1: products cannot be compiled (no OpenMP library)" in caplog.text
    assert product(torch.ones(1, 64)).isfinite().all()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_plain_weights_keep_the_type_of_the_file(tmp_path: Path, stored: torch.dtype) -> None:
    """float32 has all numbers of 16 bits, so that products and rows are exact."""
    _, dense = folders("Q8_0")
    weights = load_file(dense / "model.safetensors")
    halves = {name: each.to(stored) for name, each in weights.items()}
    folder = shutil.copytree(dense, tmp_path / "halves")
    save_file(halves, folder / "model.safetensors", {"format": "pt"})
    layer = model_of(folder, dtype="float32").layers[0]
    assert isinstance(layer, Layer)
    assert isinstance(layer.mlp, MLP)
    assert [part.kind for part in parts_of(layer.mlp.down._product)] == [KINDS[stored]]
    driver = Driver(folder, dtype="float32")
    got = driver.generate([driver.add(each) for each in PROMPTS], 6)
    assert got == [judged(folder, each, 6) for each in PROMPTS]


def test_torch_multiplies_from_the_rows_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, seen = torch.randn(8, 64), []
    method = PackedMethod()
    method._torch_from[torch.float32] = 4
    product = method.hold(weight, None)

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x @ weight.T

    monkeypatch.setattr(functional, "linear", linear)
    for rows in (3, 4):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(product(x), x @ weight.T)
    assert seen == [4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kinds": {"Q3_K": ["a"]}}, "kinds.Q3_K"),
        ({"kinds": {"Q4_K": "a"}}, r"kinds.Q4_K.*a list of names"),
        ({"bits": 4}, "quantization_config.bits"),
        ({"kinds": 4}, r"kinds.*an object"),
    ],
)
def test_another_form_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    form = {"quant_method": "gguf", "kinds": {"Q4_K": ["a"]}}
    with pytest.raises(InvalidParameter, match=words):
        quantization_of({"quantization_config": form | change})
