"""Checkpoints of every form that tools write: tokens, memory, layers of several forms, parts of
ranks, and tensors that are wrong."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.forked_rank import ForkedExecutor
from tests.engine_run.form_models import FORMS, form_folders, gptq, judged_form
from tests.engine_run.run_driver import Driver
from tests.engine_run.test_fp8 import products_of, source_of
from tests.forked import fork_server
from torch import Tensor

from tandem.engine.config import EngineConfig, read_facts
from tandem.engine.config.quantization import (
    GroupedScheme,
    Packing,
    QuantFacts,
)
from tandem.engine.loader import INPUTS, LinearPart, LoadError, Shard
from tandem.engine.quant import Product, method_of
from tandem.engine.quant.base import SideBySide
from tandem.engine.quant.dense import DenseMethod
from tandem.engine.quant.fp4 import in_powers
from tandem.engine.quant.fp8 import FP8Product
from tandem.engine.quant.grouped import GroupedMethod, GroupedProduct
from tandem.engine.quant.int8 import Int8Product
from tandem.protocol.errors import InvalidParameter

NAME = "llama-untied-biased"
PROMPTS = [[5, 9, 200, 31, 7], list(range(20, 90)), [3]]
ORDERED = [each for each in FORMS if each.endswith("ordered")]
MADE = {"gptq": GroupedProduct, "packed-8": GroupedProduct, "int8": Int8Product}
MADE |= {"float-channel": FP8Product, "mxfp4": FP8Product}
"""A form of each kind, and its product."""


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_the_weights_that_the_tensors_stand_for(form):
    """Chunks and decodes in one batch, then a prefix from the cache."""
    engine = CPUEngine(form_folders(form, NAME)[0])
    want = judged_form(form, NAME, PROMPTS, 6)
    assert engine.generate(PROMPTS, 6) == want
    assert engine.generate(PROMPTS[1:2], 6) == want[1:2]
    assert max(engine.cached.values()) >= 64


@pytest.mark.parametrize("form", MADE)
def test_a_step_of_each_kind_has_the_tokens_of_its_weights(form):
    driver = Driver(form_folders(form, NAME)[0])
    got = driver.generate([driver.add(PROMPTS[0])], 3)
    assert got == judged_form(form, NAME, PROMPTS[:1], 3)


def tensors_of(product: Product) -> list[Tensor]:
    held = product.weight if isinstance(product, GroupedProduct) else vars(product).values()
    return [each for each in held if isinstance(each, Tensor) and each.dim() > 1]


@pytest.mark.parametrize("form", MADE)
def test_weights_stay_packed_and_merged(form):
    """A product has one weight for all parts, as many bytes as in the file."""
    held = form_folders(form, NAME)[0]
    products = products_of(held, "float16")
    assert {type(each) for each in products} == {MADE[form]}
    if form == "mxfp4":  # a byte a number after the re-coding
        return
    ends = ("qweight", "weight_packed", "proj.weight")
    stored = load_file(held / "model.safetensors")
    in_file = sum(tensor.nbytes for name, tensor in stored.items() if name.endswith(ends))
    weights = [max(tensors_of(each), key=lambda tensor: tensor.nbytes) for each in products]
    assert sum(each.nbytes for each in weights) == in_file


@pytest.mark.parametrize(
    ("form", "key"),
    [("awq", "modules_to_not_convert"), ("packed", "ignore"), ("modelopt-fp8", "exclude_modules")],
)
def test_layers_left_plain_are_next_to_those_of_the_form(form, key):
    """One of q, k and v, and a whole MLP."""
    kept = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp")
    held, meant = form_folders(form, NAME, kept)
    names = [f"{kept[1]}.{each}_proj" for each in ("gate", "up", "down")]
    config = json.loads((held / "config.json").read_text())
    config["quantization_config"][key] = ["lm_head", kept[0], *names]
    (held / "config.json").write_text(json.dumps(config))
    products = products_of(held)
    assert isinstance(products[0], SideBySide)
    formed = [isinstance(each, GroupedProduct | FP8Product) for each in products[1:8]]
    assert formed == [True, True, True, True, True, False, False]
    driver = Driver(held)
    got = driver.generate([driver.add(PROMPTS[1])], 4)
    assert got == judged_form(form, NAME, PROMPTS[1:2], 4, folder=meant)


def test_groups_of_a_config_have_their_own_schemes(tmp_path: Path):
    """Attention in packed groups, the MLP in fp8 by channel."""
    packed, by_channel = form_folders("packed", NAME)[0], form_folders("float-channel", NAME)[0]
    meant = {**load_file(form_folders("packed", NAME)[1] / "model.safetensors")}
    tensors = load_file(packed / "model.safetensors")
    held = {name: each for name, each in tensors.items() if ".mlp." not in name}
    for folder, into in ((by_channel, held), (form_folders("float-channel", NAME)[1], meant)):
        found = load_file(folder / "model.safetensors")
        into |= {name: each for name, each in found.items() if ".mlp." in name}
    config = json.loads((packed / "config.json").read_text())
    groups = {}
    for form, target in (("packed", "re:.*self_attn.*"), ("float-channel", "re:.*mlp.*")):
        stated = FORMS[form][0]
        own = {"targets": [target], "format": stated["format"]}
        groups[form] = stated["config_groups"]["group_0"] | own
    config["quantization_config"] |= {"format": "mixed-precision", "config_groups": groups}
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    for name, each, stated in (("held", held, config), ("meant", meant, plain)):
        (tmp_path / name).mkdir()
        save_file(each, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(stated))
    driver = Driver(tmp_path / "held")
    got = driver.generate([driver.add(PROMPTS[1])], 4)
    assert got == judged_form("packed", NAME, PROMPTS[1:2], 4, folder=tmp_path / "meant")


def stored(form: str, folder: Path, prefixes: dict[str, int], inner: int = 256) -> Tensor:
    """Write layers of a form with a bias; the weights that their tensors stand for, merged."""
    torch.manual_seed(3)
    tensors: dict[str, Tensor] = {}
    meant = []
    for prefix, outputs in prefixes.items():
        packed, values = FORMS[form][1](torch.randn(outputs, inner))
        tensors |= {f"{prefix}.{end}": each.contiguous() for end, each in packed.items()}
        tensors[f"{prefix}.bias"] = torch.randn(outputs)
        meant.append(values)
    save_file(tensors, folder / "model.safetensors")
    return torch.cat(meant)


def facts_of(form: str) -> QuantFacts:
    facts = read_facts(form_folders(form, NAME)[0]).quantization
    assert facts is not None
    return facts


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_loads_its_part_of_a_matrix(tmp_path: Path, form):
    """Halves of the outputs side by side, and halves of the inputs summed, are the whole."""
    weight = stored(form, tmp_path, {"a": 512})
    bias = load_file(tmp_path / "model.safetensors")["a.bias"]
    x = torch.randn(5, 256)
    want, near = x @ weight.T + bias, 1e-4
    with source_of(tmp_path) as source:
        method = method_of(facts_of(form), DenseMethod(), torch.device("cpu"))

        def part(rank: int, dim: int, count: int = 2) -> Product:
            return method.load(source, [LinearPart("a", (512, 256), True, Shard(rank, count, dim))])

        if form.startswith("int8"):
            want, near = part(0, 0, 1)(x), 0.5  # each rank rounds its part of a row
            assert (want - x @ weight.T - bias).norm() < 0.02 * want.norm()
        outputs = torch.cat([part(rank, 0)(x) for rank in range(2)], 1)
        torch.testing.assert_close(outputs, want, rtol=1e-4, atol=1e-4)
        if form in ORDERED:
            with pytest.raises(LoadError, match=r"a: 256 inputs .*\(act-order\) cannot be cut"):
                part(0, INPUTS)
            return
        halves = [part(rank, INPUTS)(x[:, rank * 128 :][:, :128]) for rank in range(2)]
        torch.testing.assert_close(sum(halves), want, rtol=near / 5, atol=near)
        if facts_of(form).units[1] > 64:
            with pytest.raises(LoadError, match=r"a.*256 cannot be cut.*a multiple of 128"):
                part(0, INPUTS, 4)


@pytest.mark.parametrize("form", ["gptq", "packed-8", "float-channel", "int8", "awq"])
def test_a_product_is_cut_anywhere_along_its_outputs(tmp_path: Path, form):
    stored(form, tmp_path, {"a": 96, "b": 64})
    parts = [LinearPart("a", (96, 256), True), LinearPart("b", (64, 256), True)]
    with source_of(tmp_path) as source:
        whole = method_of(facts_of(form), DenseMethod(), torch.device("cpu")).load(source, parts)
    x = torch.randn(5, 256)
    some = whole.part(slice(70, 130))
    assert some is not None
    torch.testing.assert_close(some(x), whole(x)[:, 70:130], rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", ["gptq", "int8", "float-channel"])
def test_two_ranks_draw_the_tokens_of_one(form, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fork_server("rank")
    executor = ForkedExecutor()
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "num_gpu_blocks_override": 40}
    try:
        two = CPUEngine(form_folders(form, NAME)[0], executor=executor, **settings)
        assert two.generate(PROMPTS, 6) == judged_form(form, NAME, PROMPTS, 6)
    finally:
        executor.stop()


def test_ranks_that_would_cut_blocks_are_refused_before_loading():
    folder = form_folders("mxfp4", NAME)[0]
    with pytest.raises(InvalidParameter, match="128 values of keys, in parts of a multiple of 128"):
        EngineConfig.of(folder, device="cpu", tensor_parallel_size=2)


GPTQ = GroupedScheme(4, 32, False, True, Packing.GPTQ_V2)


def ordered(tensors: dict[str, Tensor], folder: Path) -> Product:
    """Load a layer of act-order with 64 inputs twice, merged."""
    packed, _ = gptq(torch.randn(32, 64), bits=4, group=32, symmetric=False, version=2)
    for prefix in "ab":
        for end, each in packed.items():
            tensors.setdefault(f"{prefix}.{end}", each.contiguous().clone())
    save_file(tensors, folder / "model.safetensors")
    with source_of(folder) as source:
        parts = [LinearPart(prefix, (32, 64)) for prefix in "ab"]
        return GroupedMethod(GPTQ).load(source, parts)


def test_layers_of_unlike_orders_are_side_by_side(tmp_path: Path):
    """Inputs that are sorted by group have no order; a group of another size is refused."""
    whole = ordered({}, tmp_path)
    assert isinstance(whole, GroupedProduct)
    assert whole.weight.order is None
    other = torch.arange(64, dtype=torch.int32) % 2
    assert isinstance(ordered({"b.g_idx": other}, tmp_path), SideBySide)
    other[1] = 0
    with pytest.raises(LoadError, match="b: a group has other than 32 inputs"):
        ordered({"b.g_idx": other}, tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_0_is_read_from_the_top_code(tmp_path: Path, bits):
    """GPTQ stores zero points less one."""
    packed, meant = gptq(torch.rand(32, 64), bits=bits, group=32, symmetric=False)
    stated = {f"a.{end}": each.contiguous() for end, each in packed.items()}
    save_file(stated, tmp_path / "model.safetensors")
    method = GroupedMethod(GroupedScheme(bits, 32, False, False, Packing.GPTQ))
    with source_of(tmp_path) as source:
        product = method.load(source, [LinearPart("a", (32, 64))])
    torch.testing.assert_close(product(torch.eye(64)).t(), meant, rtol=1e-6, atol=1e-6)


def test_zeros_for_a_bias_that_the_layer_has_not_are_read(tmp_path: Path):
    """AutoGPTQ stores them."""
    assert isinstance(ordered({"a.bias": torch.zeros(32)}, tmp_path), GroupedProduct)
    with pytest.raises(LoadError, match=r"a\.bias is not zero"):
        ordered({"a.bias": torch.ones(32)}, tmp_path)


@pytest.mark.parametrize("above", [14, 15])
def test_mxfp4_keeps_its_numbers_if_exponents_are_near(above):
    """All numbers of e2m1 in groups whose exponents differ; groups of zeros do not count."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6]).repeat(13)[:128].repeat(128, 1)
    numbers[:, 96:] = 0
    exponents = torch.tensor([120, 120 - above, 119, 255 - 1], dtype=torch.uint8).repeat(128, 1)
    codes, scale = in_powers(numbers, exponents)
    units = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    assert torch.equal(codes.double() * scale.double(), numbers * units) == (above <= 14)
    assert math.log2(scale.item()).is_integer()


def loaded(form: str, change: Callable[[dict[str, Tensor]], object], folder: Path) -> None:
    """Load the model of a form with its tensors changed."""
    held = form_folders(form, NAME)[0]
    tensors = load_file(held / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((held / "config.json").read_text())
    products_of(folder)


FIRST = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("form", "end"),
    [
        ("awq", "qzeros"),
        ("gptq", "scales"),
        ("gptq-8-ordered", "g_idx"),
        ("packed", "weight_packed"),
        ("packed-ordered", "weight_zero_point"),
        ("packed-ordered", "weight_g_idx"),
        ("float-channel", "weight_scale"),
        ("int8", "weight"),
        ("mxfp4", "weight_scale"),
        ("nvfp4", "weight_global_scale"),
    ],
)
def test_missing_and_misshapen_tensors_are_named(tmp_path: Path, form, end):
    name = f"{FIRST}.{end}"
    with pytest.raises(LoadError, match=f"needs {name}"):
        loaded(form, lambda tensors: tensors.pop(name), tmp_path)
    with pytest.raises(LoadError, match=f"{name} has shape"):
        loaded(form, lambda t: t.update({name: torch.cat([t[name].view(-1)] * 3)}), tmp_path)


def test_scales_without_effect_and_unknown_tensors(tmp_path: Path, caplog):
    """Static scales of activations are read and named; a dynamic form has none."""
    with caplog.at_level(logging.INFO):
        products_of(form_folders("float-tensor", NAME)[0])
    assert caplog.text.count("not applied: input_scale") == 1
    with pytest.raises(LoadError, match="input_scale"):
        loaded(
            "float-channel", lambda t: t.update({f"{FIRST}.input_scale": torch.ones(1)}), tmp_path
        )
    wrong = {f"{FIRST}.weight_shape": torch.tensor([3, 4])}
    with pytest.raises(LoadError, match=r"weight_shape is .*the model needs"):
        loaded("packed", lambda tensors: tensors.update(wrong), tmp_path)


def test_the_error_of_a_re_coding_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        products_of(form_folders("mxfp4", NAME)[0])
        assert caplog.text.count("MXFP4 re-coded to fp8 blocks, exact") == 1
        products_of(form_folders("nvfp4", NAME)[0])
    assert "NVFP4 re-coded to fp8 blocks, relative error 0.0" in caplog.text


@pytest.mark.parametrize("form", MADE)
def test_dummies_are_of_the_form(form):
    """Without files tensors are drawn, and a step over them is finite."""
    driver = Driver(form_folders(form, NAME)[0], load_format="dummy")
    driver.generate([driver.add(PROMPTS[0])], 2)
    assert torch.cat(driver.ear.heard).isfinite().all()
