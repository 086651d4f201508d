"""No kernel of a product is loaded in the middle of serving: each band of rows has been run."""

from collections import defaultdict

import pytest
import torch
from tests.engine_run.encoder_models import encoder_of
from tests.engine_run.run_driver import Driver
from tests.engine_run.tiny_models import folder_of

from tandem.engine.models import encoder, registry
from tandem.engine.quant.base import ComposedProduct, PlainMethod
from tandem.engine.quant.dense import DenseProduct
from tandem.engine.worker.worker import compare_products, load_products, product_rows
from tandem.kernels import Backend
from tandem.kernels.fp8_gemm import FP8_LINEAR, reference


@pytest.fixture
def multiplied(monkeypatch):
    """Numbers of rows of every weight's products."""
    seen = defaultdict(set)

    class Recorded(ComposedProduct):
        def __init__(self, weight, bias):
            self.plain = DenseProduct(weight, bias)

        def __call__(self, x, rows=None):
            seen[self].add(len(x))
            return self.plain(x, rows)

    class Method(PlainMethod):
        name = "recorded"

        def hold(self, weight, bias):
            return Recorded(weight, bias)

    for module in (registry, encoder):
        monkeypatch.setattr(module, "select_method", lambda *_: Method())
    return seen


def test_both_ends_of_every_band_are_among_the_rows():
    """Of 8 rows, then of 16 and 64; the last band is cut."""
    assert product_rows(1) == [1]
    assert product_rows(20) == [1, 8, 9, 16, 17, 20]
    assert product_rows(1050)[-6:] == [1017, 1024, 1025, 1040, 1041, 1050]
    assert product_rows(2150)[-4:] == [2049, 2112, 2113, 2150]
    assert product_rows(1 << 20)[-2:] == [8129, 8192]


@pytest.mark.full
def test_every_weight_is_multiplied_with_every_number_of_rows(multiplied):
    """Of a step's tokens; those of a last layer, which has few rows, with those that may draw."""
    driver = Driver(folder_of("llama"), num_blocks=8, max_num_seqs=20, max_num_batched_tokens=700)
    whole = driver.runner.model
    load_products(driver.config, driver.runner)
    assert driver.runner.model is whole
    assert driver.config.max_model_len == 512, "a step of 700 tokens is two prompts"
    tokens, draws = set(product_rows(700)), set(product_rows(20))
    of_tokens = [rows for rows in multiplied.values() if rows >= tokens]
    of_draws = [rows for rows in multiplied.values() if rows >= draws]
    assert len(of_tokens) == 5, "qkv, out, gate and up, down, and the last layer's qkv"
    assert len(of_draws) == 4, "the last layer's out, gate and up, down, and the head"
    assert len(multiplied) == 9
    assert all(max(rows) <= 700 for rows in multiplied.values())


def test_no_step_of_an_encoder_is_run(multiplied):
    """All of its steps have graphs."""
    driver = Driver(encoder_of("bert")[0], num_blocks=8, max_num_seqs=2)
    load_products(driver.config, driver.runner)
    assert not multiplied


def test_a_wrong_kernel_is_named_when_a_model_is_loaded(caplog):
    """Its products run on the model's own shapes, and plain torch runs from then on."""

    def forgetful(x, weight, scale, bias, dtype):
        return reference.fp8_linear(x, weight, scale, bias, dtype).roll(1, 1)

    cpu, right = torch.device("cpu"), FP8_LINEAR.load(Backend.TORCH)
    driver = Driver(folder_of("llama", wide=True), num_blocks=8, quantization="fp8")
    FP8_LINEAR.use(cpu, forgetful)
    try:
        compare_products(driver.config, driver.runner)
        assert FP8_LINEAR.on(cpu) is right
    finally:
        FP8_LINEAR.use(cpu, right)
    (record,) = [each for each in caplog.records if each.name == "tandem.kernels.checked"]
    assert record.getMessage().startswith("fp8_gemm.fp8_linear: the kernel for")
