"""Parts of a step that a GPU takes and a CPU can check: tables of angles, products, moments."""

import itertools

import numpy as np
import pytest
import torch
from tests.engine_run.tiny_models import MODELS, folder_of

from tandem.engine.attention.select import PagedAttention
from tandem.engine.config import EngineConfig
from tandem.engine.layers.linear import Linear
from tandem.engine.layers.rotary import Rotary
from tandem.engine.quant.base import ComposedProduct
from tandem.engine.quant.dense import DenseMethod, DenseProduct
from tandem.engine.sample.batch import SamplingKind
from tandem.engine.step import NewSequence, SchedulerOutput, SeqId, StepRow
from tandem.engine.worker import inputs as inputs_module
from tandem.engine.worker.device_events import PAST, moment
from tandem.engine.worker.input_batch import InputBatch
from tandem.engine.worker.inputs import StepStager, unpadded
from tandem.engine.worker.staging import KEPT_TAILS, StepShape
from tandem.engine.worker.step_rows import StepRows
from tandem.memory.device import DeviceMemoryError, MappedAllocator
from tandem.protocol.pooling import NO_SAMPLING, ModelPooling, PoolingParams
from tandem.protocol.sampling import SamplingParams

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

    def __call__(self, x, rows=None):
        return self.product(x, rows)


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


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_is_cut_where_its_form_can_be(with_bias):
    """Two layers give its outputs between them from the same memory; other forms say no."""
    torch.manual_seed(2)
    weight, bias, x = (
        torch.randn(48, 24),
        torch.randn(48) if with_bias else None,
        torch.randn(3, 24),
    )
    whole = Linear(DenseMethod().hold(weight, bias))
    parts = whole.split(32)
    assert parts is not None
    first, rest = parts
    assert first(x).shape == (3, 32)
    torch.testing.assert_close(torch.cat((first(x), rest(x)), 1), whole(x))
    weight.zero_()
    assert torch.equal(rest(x), whole(x)[:, 32:])
    assert Linear(Plain(DenseProduct(weight, bias))).split(32) is None


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
    batch.table.assign(0, [[3, 4]])
    stager = StepStager(batch, CPU, max_tokens=32, max_len=64)
    hosts = {id(stager.staging.open()) for _ in range(7)}
    assert len(hosts) == 3
    rows = StepRows(np.array([0]), np.array([5]), np.array([20]), 0, 20)
    inputs = stager.stage(rows, rows.ends, rows.index, unpadded)
    assert inputs.positions.tolist() == list(range(5, 25))
    assert inputs.slot_mapping.blocks.tolist() == [[3] * 11 + [4] * 9]
    assert inputs.slot_mapping.offsets.tolist() == [*range(5, 16), *range(9)]
    assert inputs.sequences.seq_lens.tolist() == [25]
    assert inputs.sequences.chunk_cu_seqlens_q.tolist() == [0, 20]


def staged(first, counts, num_decodes, wanted, *, spare=None, shape=None):
    """Three rows of two blocks each, staged, padded to ``shape`` if given; ``wanted`` is tokens."""
    batch = InputBatch(16, 4)
    for row, blocks in enumerate(([3, 4], [5, 6], [7, 8])):
        batch.table.assign(row, [blocks])
    stager = StepStager(batch, CPU, max_tokens=32, max_len=64, spare_block=spare)
    rows = StepRows(np.arange(3), np.array(first), np.array(counts), num_decodes, sum(counts))
    return stager.stage(rows, wanted, (), lambda _: None if shape is None else StepShape(*shape))


@pytest.mark.parametrize("shape", [None, StepShape(1, 60, 8)])
@pytest.mark.parametrize("few", [0, 1, 2, 8])
def test_chunks_one_by_one_are_those_written_at_once(monkeypatch, few, shape):
    """Which of the two ways a step's chunks take is a matter of speed alone."""
    rng = np.random.default_rng(3)
    first, counts = np.array([7, 0, 15, 16, 33]), np.array([1, 2, 17, 16, 14])
    batch = InputBatch(16, 8)
    batch.tokens[:] = rng.integers(0, 1000, batch.tokens.shape)
    for row in range(8):
        batch.table.assign(row, [rng.integers(0, 90, 3).tolist()])
    rows = StepRows(np.array([6, 0, 3, 2, 5]), first, counts, 1, int(counts.sum()))
    stager = StepStager(batch, CPU, max_tokens=64, max_len=64, spare_block=9)

    def stage(most):
        monkeypatch.setattr(inputs_module, "FEW_CHUNKS", most)
        stager.staging.words[8:] = -1
        inputs = stager.stage(rows, rows.ends, rows.index, lambda _: shape)
        tokens, slots = stager.token_ids(inputs), inputs.slot_mapping
        found = (tokens, inputs.positions, slots.blocks, slots.offsets)
        return [each.tolist() for each in found]

    expected = stage(0)
    assert expected[0][1:3] == batch.tokens[0, :2].tolist()
    assert stage(few) == expected
    monkeypatch.setattr(inputs_module, "LONG_CHUNKS", 12)  # of these chunks the mean is 12.25
    slices, taken = stager._fill_chunks, []

    def noted(*args):
        taken.append(args[1])
        slices(*args)

    monkeypatch.setattr(stager, "_fill_chunks", noted)
    assert stage(0) == expected
    assert taken == [1]
    monkeypatch.setattr(inputs_module, "LONG_CHUNKS", 13)
    assert stage(0) == expected
    assert taken == [1]


@pytest.mark.parametrize("wanted", [[0, 15], [5, 0, 15], [5], []])
def test_rows_that_want_their_last_token_become_decodes(wanted):
    """A plan has one query of each row whose last token is wanted, in its order, over its keys."""
    inputs = staged([9, 12, 0], [1, 5, 10], 1, np.array(wanted, dtype=np.int64))
    assert inputs.logits_indices.tolist() == wanted
    rows = [{0: 0, 5: 1, 15: 2}[token] for token in wanted]
    assert inputs.sequences.logits_rows.rows.tolist() == rows
    whole = PagedAttention(8, None).plan(inputs.sequences)
    assert whole.decode is not None
    assert whole.decode.cu_seqlens_q.tolist() == [0, 1]
    meta = whole.logits_rows
    assert meta is not None
    assert meta.prefill is None
    assert meta.num_decodes == len(rows)
    batch = meta.decode
    assert batch is not None
    if rows:
        batch.check()
    lens, blocks = [10, 17, 10], [[3, 4], [5, 6], [7, 8]]
    assert batch.cu_seqlens_q.tolist() == list(range(len(rows) + 1))
    assert batch.seq_lens.tolist() == [lens[row] for row in rows]
    assert batch.block_tables.tolist() == [blocks[row] for row in rows]
    assert batch.max_seq_len == max((lens[row] for row in rows), default=0)


def test_other_steps_have_no_wanted_rows():
    """Decodes alone, all tokens, and scored positions."""
    for inputs in (
        staged([9, 12, 0], [1, 1, 1], 3, np.array([0, 2])),
        staged([9, 12, 0], [1, 1, 1], 3, np.array([0, 2]), spare=9, shape=(4, 0, 0)),
        staged([9, 12, 0], [1, 5, 10], 1, None),
        staged([9, 12, 0], [1, 5, 10], 1, np.array([0, 5, 15, 6, 7])),
    ):
        assert inputs.sequences.logits_rows is None
        assert PagedAttention(8, None).plan(inputs.sequences).logits_rows is None


@pytest.mark.parametrize(("wanted", "kept"), [([15, 0], [3, 0]), ([], []), ([0, 5, 15], [0, 2, 3])])
def test_a_graph_with_chunks_gives_the_last_token_of_every_row(wanted, kept):
    """Those of padding too; which of them are wanted is said by row, behind the padded decodes."""
    tokens = np.array(wanted, dtype=np.int64)
    inputs = staged([9, 12, 0], [1, 5, 10], 1, tokens, spare=9, shape=(2, 20, 3))
    assert inputs.logits_indices.tolist() == [0, 1, 6, 16, 16]
    assert inputs.kept.tolist() == kept
    meta = PagedAttention(8, None).plan(inputs.sequences).logits_rows
    assert meta is not None
    assert meta.decode is not None
    assert meta.decode.check().cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 5]
    assert meta.decode.seq_lens.tolist() == [10, 0, 17, 10, 0]
    assert meta.decode.block_tables[:, :2].tolist() == [[3, 4], [0, 0], [5, 6], [7, 8], [0, 0]]


def test_a_graph_with_chunks_gives_no_scored_position():
    """Such a step is not for a graph: its tokens would be lost."""
    with pytest.raises(AssertionError, match="last tokens alone"):
        staged([9, 12, 0], [1, 5, 10], 1, np.array([6, 15]), spare=9, shape=(2, 20, 2))


def test_views_are_kept_of_graphs_shapes_alone():
    """Other steps rarely repeat: keeping theirs would fill memory, and serve nobody."""
    batch = InputBatch(16, 4)
    for row in range(3):
        batch.table.assign(row, [[3 + row, 6 + row]])
    stager = StepStager(batch, CPU, max_tokens=32, max_len=64, spare_block=9)

    def stage(count, shape):
        rows = StepRows(np.array([0]), np.array([0]), np.array([count]), 0, count)
        return stager.stage(rows, rows.ends, rows.index, lambda _: shape)

    for count in range(2, 9):
        stage(count, None)
    assert not stager.staging._kept
    shape = StepShape(0, 8, 1)
    first, second, third, fourth = (stage(5, shape) for _ in range(4))
    assert list(stager.staging._kept) == [shape]
    _, tail = stager.staging.buffers(shape, keep=True)._tails.values()  # with tables, and without
    assert first.targets is not second.targets
    assert second.targets is third.targets is fourth.targets
    assert len({id(each) for each in tail._here}) == 3  # one of each buffer


def test_what_is_kept_of_a_shape_is_bounded():
    """Sizes of what follows the fields are many where contexts grow: they are let go at once."""
    batch = InputBatch(16, 4)
    stager = StepStager(batch, CPU, max_tokens=32, max_len=64, spare_block=9)
    buffers = stager.staging.buffers(StepShape(4, 0, 0), keep=True)
    sizes = itertools.islice(itertools.product(range(32), range(5), range(17)), KEPT_TAILS + 9)
    for wanted, targets, columns in sizes:
        buffers.tail(wanted, targets, columns)
        assert 1 <= len(buffers._tails) <= KEPT_TAILS
    assert len(buffers._tails) == 9


def test_a_row_keeps_what_is_computed_of_it():
    """Of a prompt whose KV came from elsewhere the last token alone: the rest is never read, and
    writing tens of thousands of tokens would hold up the first step."""
    batch = InputBatch(16, 4)
    prompt = list(range(100, 140))
    greedy = SamplingParams(temperature=0.0, seed=0)
    new = NewSequence(SeqId(7), prompt, 40, greedy, 0, (), ([1, 2, 3],))
    batch.apply(SchedulerOutput(1, (StepRow(SeqId(7), 39, 1, (), (0,)),), (new,)))
    row = batch.row_of[SeqId(7)]
    assert batch.tokens[row, 39] == 139
    assert not batch.tokens[row, :39].any()
    assert batch.lengths[row] == batch.prompts[row] == 40
    batch.apply(SchedulerOutput(2, (), (), (SeqId(7),)))
    later = NewSequence(SeqId(8), prompt, 40, greedy, 0, (), ([1, 2, 3],))
    batch.apply(SchedulerOutput(3, (StepRow(SeqId(8), 16, 24, (), (0,)),), (later,)))
    assert batch.tokens[batch.row_of[SeqId(8)], 16:40].tolist() == prompt[16:]


def test_a_row_that_is_pooled_draws_nothing():
    """It has no columns of draws, and what drew there before and after is none of its business."""
    batch = InputBatch(16, 1)
    drawn = SamplingParams(temperature=0.7, seed=5, logprobs=2, repetition_penalty=1.5)
    prompt = list(range(8))
    for seq in (1, 3):
        batch.add(NewSequence(SeqId(seq), prompt, 8, drawn, 0, (), ([1],)))
        assert batch.sampling.kinds[0] == SamplingKind.DRAWN
        assert batch.sampling.logprobs == {0: 2}
        assert batch.sampling.follows_tokens
        batch.drop(SeqId(seq))
        asked = ModelPooling().resolve(PoolingParams(), hidden_size=4, num_tokens=8)
        batch.add(NewSequence(SeqId(seq + 1), prompt, 8, NO_SAMPLING, 0, (), ([1],), pooling=asked))
        assert batch.poolers.num_pooled == 1
        assert batch.sampling.kinds[0] == SamplingKind.GREEDY
        assert not batch.sampling.logprobs
        assert not batch.sampling.follows_tokens
        assert batch.tokens[0, :8].tolist() == prompt
        batch.drop(SeqId(seq + 1))
        assert not batch.poolers
    assert batch.row_of == {}
