"""Checkpoints in fp8: read as they are, multiplied block by block, and refused where not known."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.encoder_models import encoder_of
from tests.engine_run.fp8_models import fp8_folders, judged_fp8, quantised, scaled
from tests.engine_run.run_driver import Driver
from tests.engine_run.tiny_models import folder_of

from tandem.engine.config import EngineConfig, read_facts
from tandem.engine.config.quantization import Fp8Scheme, Granularity
from tandem.engine.loader import INPUTS, LoadError, SafetensorsWeights, Shard, open_weights
from tandem.engine.models import load_model
from tandem.engine.models.decoder import MLP, Attention, Decoder, Layer
from tandem.engine.quant import LinearMethod, LinearPart, Product
from tandem.engine.quant.base import SideBySide
from tandem.engine.quant.dense import DenseMethod
from tandem.engine.quant.fp8 import FP8Method, FP8Product
from tandem.hub import prepare
from tandem.protocol.errors import InvalidParameter

CPU = torch.device("cpu")
BLOCKS = Fp8Scheme(Granularity.BLOCK)
CASES = [("qwen3", False), ("llama", True), ("llama-untied-biased", True), ("qwen2", False)]
CASES += [("phi3", True), ("glm4", True)]
"""Layers whose parts share blocks, layers whose parts do not, and parts of one tensor."""
PROMPTS = [[5, 9, 200, 31, 7], list(range(20, 90)), [3]]


@pytest.mark.full
@pytest.mark.parametrize(("name", "wide"), CASES)
def test_tokens_are_those_of_the_scaled_weights(name, wide):
    """Mixed steps over codes and scales draw what transformers draws over what they stand for."""
    held, meant = fp8_folders(name, wide=wide)
    driver = Driver(held)
    seqs = [driver.add(prompt) for prompt in PROMPTS]
    got = driver.generate(seqs, 8, budget=23)
    assert got == [judged_fp8(meant, name, prompt, 8) for prompt in PROMPTS]


def test_an_engine_serves_it_from_what_was_prepared():
    """Through the hub's check and the scheduler; the folder keeps its codes."""
    held, meant = fp8_folders("llama", wide=True)
    (held / "tokenizer.json").write_text("{}")
    folder = prepare(str(held), progress=False).path
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert kinds == {"F32", "F8_E4M3"}
    made = CPUEngine(folder).generate(PROMPTS, 6)
    assert made == [judged_fp8(meant, "llama", prompt, 6) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["qwen3", "llama-untied-biased"])
def test_weights_rounded_at_load_are_those_of_an_fp8_checkpoint(name):
    held, _ = fp8_folders(name)
    made = CPUEngine(folder_of(name), quantization="fp8")
    assert made.generate(PROMPTS, 8) == CPUEngine(held).generate(PROMPTS, 8)
    plain = EngineConfig.of(folder_of(name), device="cpu", revision="r").fingerprint()
    rounded = made.core.config.with_(revision="r").fingerprint()
    assert plain.compatibility != rounded.compatibility


@pytest.mark.parametrize(
    ("folder", "words"), [("qwen3_5", "recurrent states"), ("bert", "an encoder")]
)
def test_models_that_are_not_rounded_are_refused(folder, words):
    found = encoder_of("bert")[0] if folder == "bert" else folder_of(folder)
    with pytest.raises(InvalidParameter, match=f"quantization: 'fp8'.*{words}"):
        EngineConfig.of(found, device="cpu", quantization="fp8")


def products_of(folder: Path, dtype: str = "float32") -> list[Product]:
    """The products of all linear layers of a loaded model."""
    config = EngineConfig.of(folder, device="cpu", dtype=dtype)
    with open_weights(config, progress=False) as weights:
        model = load_model(config.facts, weights)
    assert isinstance(model, Decoder)
    found = []
    for layer in model.layers:
        assert isinstance(layer, Layer)
        assert isinstance(layer.attention, Attention)
        assert isinstance(layer.mlp, MLP)
        found += [layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down]
    return [each._product for each in found]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_stay_in_eight_bits(dtype):
    """A byte a weight, and a scale for 16,384 of them: nothing is widened when it is loaded."""
    held, _ = fp8_folders("llama", wide=True)
    products = products_of(held, dtype)
    fp8 = [each for each in products if isinstance(each, FP8Product)]
    assert len(fp8) == len(products)
    assert all(each.weight.dtype == torch.float8_e4m3fn for each in fp8)
    tensors = load_file(held / "model.safetensors")
    in_file = sum(t.nbytes for name, t in tensors.items() if "_proj.weight" in name)
    assert sum(each.weight.nbytes + each.scale.nbytes for each in fp8) == in_file
    assert any(isinstance(each, SideBySide) for each in products_of(fp8_folders("qwen3")[0]))


def test_layers_that_were_not_converted_are_plain():
    """By the prefixes that config.json lists."""
    kept = ("model.layers.0", "model.layers.1.mlp")
    held, meant = fp8_folders("llama", wide=True, kept=kept)
    products = products_of(held)
    assert [isinstance(each, FP8Product) for each in products[:8]] == [False] * 4 + [
        True,
        True,
        False,
        False,
    ]
    driver = Driver(held)
    got = driver.generate([driver.add(PROMPTS[1])], 6)
    assert got == [judged_fp8(meant, "llama", PROMPTS[1], 6)]


def test_what_transformers_writes_of_the_form_is_read(tmp_path: Path):
    """Every key that the installed release saves beside the form."""
    import transformers

    folder = fp8_folders("llama", wide=True)[0]
    config = json.loads((folder / "config.json").read_text())
    written = transformers.FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": written}))
    facts = read_facts(tmp_path).quantization
    assert facts is not None
    assert facts.scheme("lm_head") is None
    assert facts.scheme("model.layers.0.mlp.up_proj") == BLOCKS


def loading(folder: Path, tmp_path: Path, change) -> None:
    """Load the model with its tensors changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    products_of(tmp_path)


def test_tensors_of_the_form_are_missed_and_surplus_by_name(tmp_path: Path):
    """A scale that is not there, one too many, one of another shape, and weights of other types."""
    held, _ = fp8_folders("llama", wide=True)
    first = "model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(LoadError, match=f"{first}_scale_inv"):
        loading(held, tmp_path, lambda tensors: tensors.pop(f"{first}_scale_inv"))
    with pytest.raises(LoadError, match="input_scale"):
        loading(held, tmp_path, lambda tensors: tensors.update({"input_scale": torch.ones(1)}))
    with pytest.raises(LoadError, match=f"{first}_scale_inv"):
        loading(held, tmp_path, lambda t: t.update({f"{first}_scale_inv": torch.ones(2, 3)}))
    with pytest.raises(LoadError, match=f"{first}.* is F32; read are F8_E4M3"):
        loading(held, tmp_path, lambda tensors: tensors.update({first: torch.ones(256, 256)}))
    config = json.loads((held / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(held / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match="F8_E4M3"):
        products_of(tmp_path)


def test_dummies_are_of_the_form(tmp_path: Path):
    """Without files, codes and scales are drawn, and a step over them is finite."""
    held, _ = fp8_folders("llama", wide=True)
    driver = Driver(held, load_format="dummy")
    driver.generate([driver.add(PROMPTS[0])], 3)
    assert torch.cat(driver.ear.heard).isfinite().all()


def source_of(folder: Path) -> SafetensorsWeights:
    return SafetensorsWeights(folder, dtype=torch.float32, device=CPU, progress=False)


@pytest.mark.parametrize("form", ["plain", "fp8"])
def test_a_rank_loads_its_part_of_a_matrix(tmp_path: Path, form):
    """Halves of the outputs side by side, and halves of the inputs summed, are the whole; a bias
    is cut with the outputs, and added once beside inputs."""
    torch.manual_seed(3)
    weight = torch.randn(512, 256)
    tensors = {"a.weight": weight, "a.bias": torch.randn(512)}
    method: LinearMethod = DenseMethod()
    if form == "fp8":
        codes, scale = quantised(weight)
        tensors |= {"a.weight": codes, "a.weight_scale_inv": scale}
        weight, method = scaled(codes, scale), FP8Method(BLOCKS)
    save_file(tensors, tmp_path / "model.safetensors")
    x = torch.randn(5, 256)
    want = x @ weight.T + tensors["a.bias"]
    with source_of(tmp_path) as source:

        def part(rank, dim, count=2):
            return method.load(source, [LinearPart("a", (512, 256), True, Shard(rank, count, dim))])

        outputs = torch.cat([part(rank, 0)(x) for rank in range(2)], 1)
        torch.testing.assert_close(outputs, want, rtol=1e-4, atol=1e-4)
        halves = [part(rank, INPUTS)(x[:, rank * 128 :][:, :128]) for rank in range(2)]
        torch.testing.assert_close(sum(halves), want, rtol=1e-4, atol=1e-4)
        with pytest.raises(LoadError, match="cannot be cut into 3"):
            part(0, 0, 3)
        if form == "fp8":
            with pytest.raises(LoadError, match="a multiple of 128"):
                part(0, INPUTS, 4)
