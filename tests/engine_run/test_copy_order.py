"""Who waits for whom where blocks go to host memory and come back, as a GPU's streams have it.

The streams are pretended, and say what is behind what; blocks that steps write are those of a real
model on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.engine_run.cpu_engine import GREEDY, ROUTER, CPUEngine
from tests.engine_run.drafting import Guesses, guess
from tests.engine_run.test_drafts import DRAFTS
from tests.engine_run.tiny_models import folder_of

from tandem.engine.step import BlockLoad, BlockTransfers, SchedulerOutput
from tandem.engine.worker import offload, runner
from tandem.engine.worker.device_events import DeviceEvent
from tandem.engine.worker.input_batch import InputBatch
from tandem.engine.worker.launched import LaunchedStep
from tandem.engine.worker.offload import STORES_AT_ONCE, HostBlocks, blocks_written
from tandem.memory import streams
from tandem.protocol.ids import RequestKey
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

BLOCKS = 8 * STORES_AT_ONCE
PROMPTS = [[(11 * each + 7 * at) % 300 + 5 for at in range(25 + 9 * each)] for each in range(4)]


class Stream:
    """A GPU's, as far as it says what is behind what."""

    def __init__(self, *_device: object) -> None:
        self.queued: set[object] = set()
        """All that was done when the stream is through."""

    def wait_stream(self, other: Stream) -> None:
        """What comes is behind all that ``other`` has."""
        self.queued |= other.queued

    def wait_event(self, event: Event) -> None:
        self.queued |= event.behind


class Event:
    """Recorded on a stream; nothing is done until ``device`` says so."""

    device: Device

    def __init__(self) -> None:
        self.behind: frozenset[object] = frozenset()

    def record(self) -> None:
        self.behind = frozenset(self.device.on.queued)

    def query(self) -> bool:
        return self.behind <= self.device.done


class Device:
    """Three streams, and host memory whose copies are noted on them by their pairs of blocks."""

    def __init__(self, gpu: pytest.MonkeyPatch) -> None:
        self.steps = self.on = Stream()
        self.done: frozenset[object] = frozenset()
        gpu.setattr(Event, "device", self, raising=False)
        gpu.setattr(streams, "_spare", {})  # else those of the test before are used again
        gpu.setattr(torch.cuda, "Stream", Stream)
        gpu.setattr(torch.cuda, "Event", Event)
        gpu.setattr(torch.cuda, "current_stream", lambda _device: self.on)
        gpu.setattr(torch.cuda, "stream", self.within)
        gpu.setattr(HostBlocks, "_store", lambda _host, pairs: self.note(*pairs))
        gpu.setattr(HostBlocks, "_fill", lambda _host, load: self.note(load.ticket))
        self.host = HostBlocks(torch.zeros(BLOCKS, 3, dtype=torch.uint8), BLOCKS)
        self.host._queue = offload._Queue(torch.device("cuda"))
        self.begun: dict[object, frozenset[object]] = {}
        """By copy, what it is behind."""

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        self.on = stream
        yield
        self.on = self.steps

    def note(self, *copies: object) -> None:
        for each in copies:
            self.begun[each] = frozenset(self.on.queued)
            self.on.queued.add(each)

    def begin(
        self, stores: Sequence[tuple[int, int]] = (), *, loads: Any = (), writes: Sequence[int] = ()
    ) -> DeviceEvent | None:
        return self.host.begin(BlockTransfers(tuple(stores), tuple(loads)), frozenset(writes))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with monkeypatch.context() as gpu:
        yield Device(gpu)


def pairs_of(blocks: range) -> list[tuple[int, int]]:
    """Each goes to the host block of its number from the end."""
    return [(block, BLOCKS - 1 - block) for block in blocks]


def test_no_step_waits_for_a_load(device: Device) -> None:
    """Not even one behind a store that came later: a long prefix takes a tenth of a second, and all
    running streams would stand still. A load is behind the steps and stores that came before it."""
    device.steps.queued.add("step")
    device.begin([(0, 1)], writes=[0])
    device.begin([(1, 0)])
    device.begin(loads=[BlockLoad(7, ((1, 2),))])
    device.begin([(3, 2)], writes=[3])
    assert device.steps.queued == {"step", (0, 1), (3, 2)}
    assert device.begun[7] == {"step", (0, 1), (1, 0)}
    assert 7 not in device.begun[3, 2]


def test_a_step_waits_for_stores_of_what_it_writes_alone(device: Device) -> None:
    """A long prompt's blocks take a tenth of a second to go: the step that begins it waits for its
    own, and a decode's new block for no other's; a later step for those until its own."""
    prompt = pairs_of(range(BLOCKS - 8))
    device.begin([*prompt, (BLOCKS - 1, 0)], writes=[0, 1, BLOCKS - 1])
    assert device.steps.queued == {*prompt[:2], (BLOCKS - 1, 0)}
    device.steps.queued.add("step")
    assert device.begun[prompt[2]] == {*prompt[:2], (BLOCKS - 1, 0)}, "beside the step"

    device.begin([(BLOCKS - 2, 1)], writes=[BLOCKS - 2, BLOCKS - 3])
    assert device.begun[BLOCKS - 2, 1] == {*prompt[:2], (BLOCKS - 1, 0), "step"}
    assert prompt[2] not in device.steps.queued

    device.begin(writes=[2 + STORES_AT_ONCE])
    assert {each for each in prompt if each in device.steps.queued} == {
        *prompt[: 2 + 2 * STORES_AT_ONCE]
    }
    device.begin(writes=[3 * STORES_AT_ONCE, 7 * STORES_AT_ONCE])
    assert prompt[7 * STORES_AT_ONCE] in device.steps.queued


def test_what_is_done_holds_nobody_up(device: Device) -> None:
    """And the steps need not say what they write any more."""
    prompt = pairs_of(range(2 * STORES_AT_ONCE))
    assert not device.host.is_storing
    device.begin(prompt)
    device.done = frozenset(prompt[:STORES_AT_ONCE])
    assert device.host.is_storing
    device.begin(writes=[0])
    assert not device.steps.queued, "it has gone already"
    device.done = frozenset(prompt)
    assert not device.host.is_storing
    assert device.begin(writes=[STORES_AT_ONCE]) is None


def test_a_host_block_has_what_was_stored_last(device: Device) -> None:
    """One that is given to another block while the first is on its way to it."""
    device.begin([(0, 9)])
    device.begin([(1, 9)], writes=[1])
    assert (0, 9) in device.begun[1, 9]
    device.begin([(2, 9)])
    assert (1, 9) in device.begun[2, 9]


def test_whoever_writes_past_the_steps_waits_for_all_stores(device: Device) -> None:
    """By the fence of a step, which is not done before; the step's tokens do not wait for it."""
    first, second = pairs_of(range(2)), pairs_of(range(2, 4))
    stored = [device.begin(first), device.begin(second), device.begin()]
    steps = [LaunchedStep(at, stored=each) for at, each in enumerate(stored)]
    for done, count in (((), 0), (first, 1), ([*first, *second], 3)):
        device.done = frozenset(done)
        assert [each.fence.done() for each in steps] == [at < count for at in range(3)]
    device.done = frozenset()
    assert steps[0].result(seconds=0).sampled == ()
    with pytest.raises(TimeoutError):  # nobody waits for a step that computes nothing
        LaunchedStep(3, stored=stored[0], for_transfers=True).result(seconds=0)


def test_a_copied_block_is_written() -> None:
    assert blocks_written(SchedulerOutput(1, (), block_copies=((4, 2),)), InputBatch(16, 1)) == {2}


def test_a_step_writes_the_blocks_that_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other: chunks, decodes, drafts, choices that share a prompt, and who is resumed."""
    launch, seen = runner.ModelRunner.launch, set[str]()

    def looked(self: runner.ModelRunner, plan: SchedulerOutput) -> LaunchedStep:
        before = self.kv_cache.blocks.clone()
        step = launch(self, plan)
        changed = (self.kv_cache.blocks != before).any(1).nonzero().flatten().tolist()
        written = blocks_written(plan, self.batch)
        assert set(changed) <= written
        most = sum(row.num_scheduled_tokens // 16 + 2 for row in plan.rows) + len(plan.block_copies)
        assert len(written) <= most
        kinds = {"copies": plan.block_copies, "drafts": plan.drafts, "dropped": plan.dropped}
        seen.update(name for name, each in kinds.items() if each)
        return step

    monkeypatch.setattr(runner.ModelRunner, "launch", looked)
    plain = CPUEngine(folder_of("llama"), num_gpu_blocks_override=40)
    tokens = plain.generate(PROMPTS[:1], 30)[0]
    engine = CPUEngine(
        folder_of("llama"),
        num_gpu_blocks_override=12,
        max_num_batched_tokens=48,
        block_size=16,
        speculative_config=DRAFTS,
    )
    engine.add(PROMPTS[0], 30, GREEDY)
    for name, prompt in enumerate(PROMPTS[1:]):
        params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=30, ignore_eos=True)
        key = RequestKey(ROUTER, f"n{name}", 0)
        engine.core.add(EngineCoreRequest(key=key, prompt_token_ids=prompt, params=params))
    guess(engine, Guesses([(PROMPTS[0], tokens)], wrong_every=3))
    while engine.core.has_work:
        engine.core.advance()
    assert seen == {"copies", "drafts", "dropped"}
