"""Parts of a step that a GPU takes and a CPU can check: tables of angles, products, moments."""

import numpy as np
import pytest
import torch
from tests.engine_run.tiny_models import MODELS, folder_of

from tandem.engine.config import EngineConfig
from tandem.engine.layers.rotary import Rotary
from tandem.engine.quant.composed import ComposedProduct
from tandem.engine.quant.dense import DenseProduct
from tandem.engine.worker.device_memory import DeviceMemoryError, MappedAllocator
from tandem.engine.worker.events import PAST, moment
from tandem.engine.worker.input_batch import InputBatch
from tandem.engine.worker.inputs import StepStager, unpadded
from tandem.engine.worker.rows import StepRows

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", MODELS)
def test_tabulated_angles_are_those_of_the_positions(name):
    """A table changes nothing: every kind of scaling, positions in any order."""
    facts = EngineConfig.of(folder_of(name), device="cpu").facts
    rotary = Rotary(facts, dtype=torch.float32, device=CPU)
    positions = torch.tensor([0, 511, 3, 200, 3])
    want = rotary(positions)
    rotary.tabulate(512)
    got = rotary(positions)
    assert torch.equal(got.cos, want.cos)
    assert torch.equal(got.sin, want.sin)


class Plain(ComposedProduct):
    """The same product with its neighbours as ops of their own."""

    def __init__(self, product: DenseProduct) -> None:
        self.product = product

    def __call__(self, x):
        return self.product(x)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_with_their_neighbours_are_the_same_sums(rows, with_bias):
    """Norm before, residual and gate after: folded in or apart, with and without bias."""
    torch.manual_seed(rows)
    weight, x = torch.randn(48, 24), torch.randn(rows, 24)
    gain = torch.rand(24) + 0.5
    dense = DenseProduct(weight, torch.randn(48) if with_bias else None)
    plain = Plain(dense)
    stream = torch.randn(rows, 48)
    torch.testing.assert_close(dense.of_norm(x, gain, 1e-6), plain.of_norm(x, gain, 1e-6))
    torch.testing.assert_close(
        dense.gated_of_norm(x, gain, 1e-6), plain.gated_of_norm(x, gain, 1e-6)
    )
    torch.testing.assert_close(
        dense.add_to(stream.clone(), x), plain.add_to(stream.clone(), x), rtol=1e-4, atol=1e-4
    )
    assert dense.in_float32(x).dtype == torch.float32


def test_a_stream_is_added_to_in_place():
    """The residual stream is one tensor: what is returned is what was given."""
    stream, weight = torch.zeros(2, 8), torch.ones(8, 4)
    assert DenseProduct(weight, None).add_to(stream, torch.ones(2, 4)) is stream
    assert (stream == 4).all()


def test_a_cpu_is_past_every_moment():
    """No queue, nothing to wait for."""
    assert moment(CPU) is PAST
    assert PAST.done()
    PAST.wait(0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_memory_without_a_driver_is_refused_in_words():
    """Where there is no GPU the allocator says so when it is made."""
    with pytest.raises((DeviceMemoryError, RuntimeError, AssertionError)) as refused:
        MappedAllocator(torch.device("cuda"))
    assert str(refused.value)


def test_host_buffers_take_turns():
    """Steps filled ahead of each other do not write over the numbers that are on their way."""
    batch = InputBatch(16, 4)
    batch.table.assign(0, [3, 4])
    stager = StepStager(batch, CPU, max_tokens=32, max_len=64)
    hosts = {id(stager.staging.open()) for _ in range(7)}
    assert len(hosts) == 3
    rows = StepRows(np.array([0]), np.array([5]), np.array([20]), 0)
    inputs = stager.stage(rows, rows.ends, rows.index, unpadded)
    assert inputs.positions.tolist() == list(range(5, 25))
    assert inputs.slots.blocks.tolist() == [3] * 11 + [4] * 9
    assert inputs.slots.offsets.tolist() == [*range(5, 16), *range(9)]
    assert inputs.sequences.seq_lens.tolist() == [25]
    assert inputs.sequences.chunk_start.tolist() == [0, 20]
