"""Steps padded to the shapes of graphs, run without graphs, and steps launched ahead."""

import pytest
import torch
from tests.engine_run.run_driver import GREEDY, Driver
from tests.engine_run.tiny_models import folder_of, judged

from tandem.engine.sample import SamplingKind
from tandem.engine.sample.bounds import BoundsStage
from tandem.engine.step import NewSequence, SchedulerOutput, SeqId, StepRow
from tandem.engine.worker.graphs import SamplerGraphs, StepGraphs, decode_sizes, step_shapes
from tandem.engine.worker.inputs import StepStager
from tandem.engine.worker.kv_cache import KVCacheMemory
from tandem.engine.worker.staging import StepShape
from tandem.protocol.sampling import SamplingParams

PROMPTS = [list(range(20, 61)), list(range(5, 9)), list(range(100, 200)), [7, 8, 9, 10, 11]]


class Uncaptured(StepGraphs):
    """Classes whose replay is the padded step itself."""

    def __init__(self, runner) -> None:
        super().__init__()
        self.runner = runner
        self.replayed: list[StepShape] = []

    def replay(self, shape):
        """Run what is staged at the class's addresses."""
        self.replayed.append(shape)
        self.hidden = self.runner.hidden(self.runner.stager.views(shape, None, torch.empty(0)))
        return self.hidden


class UncapturedChoices(SamplerGraphs):
    """Choices that are drawn, when they are replayed, from what the step's class has left."""

    def __init__(self, runner) -> None:
        super().__init__()
        self.runner = runner
        self.replayed: list[tuple[SamplingKind, bool]] = []

    def has(self, shape):
        return not shape.chunks

    def replay(self, shape, kind, *, bounded):
        self.replayed.append((kind, bounded))
        bounds = self.runner.batch.sampling.bounds.all_of(shape.decodes) if bounded else None
        return self.runner.choose(shape, kind, self.runner.graphs.hidden, bounds)


@pytest.fixture(scope="module")
def padded():
    """An engine whose steps are padded; its block behind the last is full of NaN."""
    driver = Driver(folder_of("llama"), num_blocks=120, max_num_seqs=8)
    runner, groups = driver.runner, driver.config.layer_groups
    runner.kv_cache = KVCacheMemory(groups, 120, torch.device("cpu"), spare=1)
    runner.kv_cache.memory.view(torch.float32).fill_(torch.nan)
    runner.stager = StepStager(
        runner.batch, torch.device("cpu"), max_tokens=600, max_len=512, spare_block=120
    )
    graphs = Uncaptured(runner)
    graphs.offer([StepShape(4, 0, 0), StepShape(0, 44, 8), StepShape(6, 50, 8)])
    runner.graphs = graphs
    return driver


def test_padded_steps_draw_the_same_tokens(padded):
    """Prompts in chunks, mixed with decodes, then decodes alone: as transformers draws."""
    seqs = [padded.add(prompt) for prompt in PROMPTS]
    got = padded.generate(seqs, 9, budget=43)
    assert got == [judged("llama", prompt, 9)[0] for prompt in PROMPTS]
    shapes = set(padded.runner.graphs.replayed)
    assert shapes == {StepShape(4, 0, 0), StepShape(0, 44, 8), StepShape(6, 50, 8)}
    for seq in seqs:
        padded.drop(seq)


FILTERED = SamplingParams(temperature=0.9, top_p=0.8, top_k=20, seed=7)
DRAWN = SamplingParams(temperature=0.8, seed=3)


@pytest.fixture
def choosing(padded):
    """The same engine, with choices behind its classes of decodes."""
    sampling, before = padded.runner.batch.sampling, padded.runner.choices
    padded.runner.choices = UncapturedChoices(padded.runner)
    words = -(-padded.config.facts.vocab_size // 32)
    sampling.bounds = BoundsStage(8, words, torch.device("cpu"))
    yield padded
    padded.runner.choices, sampling.bounds = before, None


def generated(driver, asked, at_once=True, allowed=()):
    """Six tokens of PROMPTS under parameters each, as the choices 0, 1, ... of their requests; of
    the first ones, out of the ids ``allowed`` to each."""
    pairs = enumerate(zip(PROMPTS, asked, strict=False))
    seqs = [driver.add(prompt, each, choice=number) for number, (prompt, each) in pairs]
    for seq, ids in zip(seqs, allowed, strict=False):
        driver.lines[seq].allowed = ids
    together = [seqs] if at_once else [[seq] for seq in seqs]
    made = [tokens for some in together for tokens in driver.generate(some, 6)]
    for seq in seqs:
        driver.drop(seq)
    return made


@pytest.mark.parametrize(
    ("params", "kind"),
    [(GREEDY, SamplingKind.GREEDY), (DRAWN, SamplingKind.DRAWN), (FILTERED, SamplingKind.FILTERED)],
    ids=["greedy", "drawn", "filtered"],
)
def test_choices_of_a_class_are_those_of_the_sampler(choosing, params, kind):
    """Rows that draw alike draw the same tokens, in a batch that is padded and one by one."""
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    asked = [SamplingParams(**{**fields, "seed": seed}) for seed in range(3)]
    made = generated(choosing, asked)
    assert set(choosing.runner.choices.replayed) == {(kind, False)}
    choosing.runner.choices = SamplerGraphs()
    assert made == generated(choosing, asked) == generated(choosing, asked, at_once=False)


@pytest.mark.full
@pytest.mark.parametrize("params", [GREEDY, DRAWN, FILTERED], ids=["greedy", "drawn", "filtered"])
@pytest.mark.parametrize("bounded", [1, 2, 3])
def test_choices_within_grammars_are_those_of_the_sampler(choosing, params, bounded):
    """What a grammar allows is read where the graph reads it, for the rows that have one."""
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    asked = [SamplingParams(**{**fields, "seed": seed}) for seed in range(3)]
    allowed = [[7, 40, 41], [9, 100], [3, 12, 200]][:bounded]
    made = generated(choosing, asked, allowed=allowed)
    assert any(within for _, within in choosing.runner.choices.replayed)
    for tokens, ids in zip(made, allowed, strict=False):
        assert set(tokens) <= set(ids)
    choosing.runner.choices = SamplerGraphs()
    choosing.runner.batch.sampling.bounds = None
    assert made == generated(choosing, asked, allowed=allowed)
    assert made != generated(choosing, asked)


ALLOWED = [[7, 40, 41], [9, 100], [3, 12, 200], [5, 6]]


def test_rows_that_draw_in_different_ways_keep_within_their_grammars(choosing):
    """Best, drawn, filtered and ruled rows of one step read the words that it holds, each its own:
    they came to the device once, whatever groups the sampler makes of the rows."""
    ruled = SamplingParams(temperature=0.0, seed=0, logit_bias={6: 5.0})
    asked = [FILTERED, GREEDY, DRAWN, ruled]
    sampling = choosing.runner.batch.sampling
    held: list[int] = []
    hold, steps = sampling.bounds.hold, choosing._steps

    def holding(words: torch.Tensor) -> None:
        held.append(len(words))
        hold(words)

    sampling.bounds.hold = holding
    made = generated(choosing, asked, allowed=ALLOWED)
    assert choosing.runner.choices.replayed == []  # they draw in different ways
    for tokens, ids in zip(made, ALLOWED, strict=True):
        assert set(tokens) <= set(ids)
    assert max(held) == 4
    assert len(held) <= choosing._steps - steps  # once a step that draws
    sampling.bounds = None
    assert made == generated(choosing, asked, allowed=ALLOWED)


@pytest.mark.parametrize(
    "asked",
    [
        [GREEDY, DRAWN, FILTERED],
        [GREEDY, GREEDY, SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.4)],
        [GREEDY, GREEDY, SamplingParams(temperature=0.0, seed=0, logprobs=2)],
    ],
    ids=["kinds", "rules", "logprobs"],
)
def test_rows_that_draw_otherwise_go_through_the_sampler(choosing, asked):
    """One row that draws in another way, or asks for more: no class's choice is taken."""
    made = generated(choosing, asked)
    # The last steps of the longest prompt, whose row is the only one.
    alone = {(SamplingKind.FILTERED, False)}
    assert set(choosing.runner.choices.replayed) <= alone
    choosing.runner.choices = SamplerGraphs()
    assert made == generated(choosing, asked, at_once=False)


@pytest.mark.parametrize("params", [GREEDY, DRAWN, FILTERED], ids=["greedy", "drawn", "filtered"])
def test_choices_launched_ahead_go_on_by_the_device(choosing, params):
    """Each step takes the token that the choice before it has kept."""
    seq = choosing.add(PROMPTS[0], params)
    (want,) = choosing.generate([seq], 5)
    choosing.drop(seq)
    choosing.runner.choices.replayed.clear()
    assert decode_ahead(choosing, params) == want
    assert len(choosing.runner.choices.replayed) == 4


def test_blocks_that_were_given_long_before_are_read(padded):
    """A sequence may have all its blocks from the start: each step reads those that it has come to,
    also where no table changed since the step before."""
    prompt, size = list(range(20, 152)), padded.config.cache.block_size
    blocks = [padded._free.pop() for _ in range(-(-(len(prompt) + 24) // size))]
    seq = SeqId(10**7)
    new = NewSequence(seq, prompt, len(prompt), GREEDY, 0, (), (blocks,))
    execute, step, drawn = padded.executor.execute, 700, []
    for at in range(0, len(prompt), 44):
        choices = (0,) if at + 44 == len(prompt) else ()
        plan = SchedulerOutput(step, (StepRow(seq, at, 44, (), choices),), () if at else (new,))
        drawn += execute(plan).result().sampled
        step += 1
    for at in range(len(prompt), len(prompt) + 23):
        drawn += execute(SchedulerOutput(step, (StepRow(seq, at, 1, (), (0,)),))).result().sampled
        step += 1
    execute(SchedulerOutput(step, (), (), (seq,))).result()
    padded._free += blocks
    assert [each.token_ids[0][0] for each in drawn] == judged("llama", prompt, 24)[0]


def test_a_prompt_that_becomes_a_decode_is_read_in_its_new_place(padded):
    """A step of the same rows and the same class, no block more, of which one is a decode now: rows
    are placed by how many of them are."""
    size, first = padded.config.cache.block_size, 10**7 + 1
    prompts = [list(range(20, 152)), list(range(30, 70)), list(range(90, 140))]
    seqs = [SeqId(first + number) for number in range(3)]
    held = [[padded._free.pop() for _ in range(-(-(len(each) + 3) // size))] for each in prompts]
    new = [
        NewSequence(seq, prompt, len(prompt), GREEDY, 0, (), (blocks,))
        for seq, prompt, blocks in zip(seqs, prompts, held, strict=True)
    ]
    a, b, c = seqs
    drawn: dict[SeqId, list[int]] = {seq: [] for seq in seqs}
    steps = [
        ([(a, 0, 44)], (new[0],)),
        ([(a, 44, 44)], ()),
        ([(a, 88, 44)], ()),
        ([(a, 132, 1), (b, 0, 20)], (new[1], new[2])),
        ([(a, 133, 1), (b, 20, 20), (c, 0, 20)], ()),
        ([(a, 134, 1), (b, 40, 1), (c, 20, 30)], ()),
    ]
    padded.runner.graphs.replayed.clear()
    for number, (rows, came) in enumerate(steps, start=800):
        ends = {seq: len(prompt) for seq, prompt in zip(seqs, prompts, strict=True)}
        given = [
            StepRow(seq, at, count, (), (0,) if at + count >= ends[seq] else ())
            for seq, at, count in rows
        ]
        out = padded.executor.execute(SchedulerOutput(number, tuple(given), came)).result()
        for each in out.sampled:
            drawn[each.seq] += each.token_ids[0]
    assert padded.runner.graphs.replayed[-2:] == [StepShape(6, 50, 8)] * 2
    padded.executor.execute(SchedulerOutput(900, (), (), tuple(seqs))).result()
    padded._free += [block for blocks in held for block in blocks]
    for seq, prompt, count in zip(seqs, prompts, (4, 2, 1), strict=True):
        assert drawn[seq] == judged("llama", prompt, count)[0]


def test_scored_prompts_are_not_padded(padded):
    """Steps whose positions are scored run as they are, and give every score."""
    seq = padded.add(PROMPTS[0], SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0))
    padded.runner.graphs.replayed.clear()
    out = padded.step((seq, len(PROMPTS[0])))
    assert len(out.prompt_logprobs[seq]) == len(PROMPTS[0]) - 1
    assert padded.runner.graphs.replayed == []
    padded.drop(seq)


def test_a_step_fits_the_smallest_class_that_holds_it():
    """Decodes go to decode classes, others to classes with chunks; what is larger to none."""
    graphs = StepGraphs()
    graphs.offer(step_shapes(max_rows=256, max_tokens=8192, max_captured=2048))
    for decodes, chunk in ((1, 1023), (16, 1008), (64, 960), (90, 700), (128, 1024)):
        found = graphs.fit(StepShape(decodes, chunk, 1))
        assert found is not None, "a default budget beside decodes is launched as a graph"
        assert found.tokens <= 128 + decodes + chunk
    assert graphs.fit(StepShape(129, 1024, 1)) is None
    assert graphs.fit(StepShape(1, 0, 0)) == StepShape(1, 0, 0)
    assert graphs.fit(StepShape(33, 0, 0)) == StepShape(40, 0, 0)
    assert graphs.fit(StepShape(0, 100, 3)) == StepShape(0, 128, 8)
    assert graphs.fit(StepShape(3, 60, 1)) == StepShape(16, 112, 8)
    assert graphs.fit(StepShape(257, 0, 0)) is None
    assert graphs.fit(StepShape(0, 600, 1)) == StepShape(0, 640, 8)
    assert graphs.fit(StepShape(0, 2048, 8)) == StepShape(0, 2048, 8)
    assert graphs.fit(StepShape(0, 2049, 1)) is None
    assert graphs.fit(StepShape(1, 600, 1)) == StepShape(16, 624, 8)
    assert graphs.fit(StepShape(22, 513, 1)) == StepShape(64, 576, 8)
    assert graphs.fit(StepShape(1, 1137, 1)) is None
    own = [StepShape(*each) for each in graphs.sizes]
    assert [each for each in own if graphs.fit(each) != each] == []
    assert graphs.fit(StepShape(0, 100, 9)) is None


def test_no_class_is_larger_than_asked():
    """By the tokens of a captured step, or of any step."""
    for limits in ((8192, 512), (512, 2048)):
        graphs = StepGraphs()
        graphs.offer(step_shapes(max_rows=256, max_tokens=limits[0], max_captured=limits[1]))
        assert graphs.fit(StepShape(0, 512, 1)) == StepShape(0, 512, 8)
        assert graphs.fit(StepShape(0, 513, 1)) is None


def test_classes_cover_every_batch_up_to_the_seats():
    """The largest decode class is the number of seats, whatever it is."""
    for seats in (1, 3, 100, 256, 700):
        sizes = decode_sizes(seats)
        assert sizes[-1] == seats
        assert sizes == sorted(set(sizes))
    few = step_shapes(max_rows=4, max_tokens=40, max_captured=2048)
    assert all(each.decodes <= 4 and each.tokens <= 40 for each in few)


def decode_ahead(driver, params):
    """A prompt and four decodes launched before any result is read; what they drew."""
    prompt, size = PROMPTS[0], driver.config.cache.block_size
    blocks = [driver._free.pop() for _ in range(-(-(len(prompt) + 6) // size))]
    seq = SeqId(10**6 + len(driver._free))
    new = NewSequence(seq, list(prompt), len(prompt), params, 0, (2,), (blocks,))
    row = StepRow(seq, 0, len(prompt), (), (0,))
    futures = [driver.executor.execute(SchedulerOutput(500, (row,), (new,)))]
    for at in range(4):
        row = StepRow(seq, len(prompt) + at, 1, (), (0,))
        futures.append(driver.executor.execute(SchedulerOutput(501 + at, (row,))))
    drawn = [future.result().sampled[0].token_ids[0][0] for future in futures]
    driver.executor.execute(SchedulerOutput(600, (), (), (seq,))).result()
    return drawn


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.4),
    ],
    ids=["greedy", "drawn", "penalised"],
)
def test_steps_launched_ahead_draw_the_same_tokens(padded, params):
    """Tokens go from step to step without the host, and to it first where a rule looks back."""
    seq = padded.add(PROMPTS[0], params)
    (want,) = padded.generate([seq], 5)
    padded.drop(seq)
    assert decode_ahead(padded, params) == want


@pytest.mark.parametrize("seats", [1, 2, 5])
def test_every_shape_of_a_small_engine_is_staged(seats):
    """An engine of fewer sequences than a graph has chunks has room for each of its graphs."""
    driver = Driver(folder_of("llama"), num_blocks=8, max_num_seqs=seats)
    stager = StepStager(
        driver.runner.batch, torch.device("cpu"), max_tokens=2500, max_len=64, spare_block=7
    )
    for shape in step_shapes(max_rows=seats, max_tokens=2500, max_captured=2048, num_drafts=15):
        assert stager.stage_nothing(shape).shape == shape
