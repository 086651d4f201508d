"""An engine in this process: streams, refusals, aborts, and ends that everybody hears of."""

import asyncio
import threading
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any

import pytest
from tests.engine_plan.builders import EOS, config_of, params_of, request_of
from tests.engine_plan.sim import SimExecutor
from tests.workers.proc_worker import PacedExecutor

from tandem.engine.core.client import InprocClient
from tandem.engine.core.engine_core import EngineCore, StepOutputs
from tandem.engine.step import ModelRunnerOutput, SchedulerOutput
from tandem.protocol.commands import Command, CommandName
from tandem.protocol.context import RequestContext, Route, Shape
from tandem.protocol.errors import (
    FailCause,
    InvalidParameter,
    Refusal,
    RefusalCode,
    RequestFailed,
    RequestRefused,
)
from tandem.protocol.outputs import EngineCoreOutput
from tandem.protocol.requests import EngineCoreRequest

WAIT = 100.0
"""Less than a test gets; nothing takes a part of it, unless it never ends."""
STATS = Command(id=1, name=CommandName.STATS)


class HeldExecutor(SimExecutor):
    """Runs a step only after it was let go."""

    def __init__(self, num_blocks: int = 64) -> None:
        super().__init__(num_blocks, verify=True)
        self.go = threading.Event()
        self.entered = threading.Event()
        self.error: Exception | None = None
        self.stopped = False

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self.entered.set()
        assert self.go.wait(WAIT)
        if self.error is not None:
            raise self.error
        return super().execute(plan)

    def stop(self) -> None:
        self.stopped = True
        super().stop()


def client_of(executor: SimExecutor | None = None, **flat: object) -> InprocClient:
    """A client over an engine of its own."""
    executor = executor if executor is not None else SimExecutor(64, verify=True)
    return InprocClient(EngineCore.launch(config_of(**flat), executor))


async def tokens_of(client: InprocClient, request: EngineCoreRequest) -> dict[int, list[int]]:
    """All tokens of a request by choice."""
    found: dict[int, list[int]] = {}
    async with asyncio.timeout(WAIT):
        async for output in client.stream(request):
            assert isinstance(output, EngineCoreOutput)
            mine = found.setdefault(output.choice, [])
            assert output.position == len(mine)
            mine += output.token_ids
    return found


@pytest.mark.parametrize("overlap", [False, True])
async def test_streams_give_each_request_its_tokens(overlap):
    """Many at once, with several choices, each in order and to the end."""
    executor = SimExecutor(24, verify=True)
    client = client_of(executor, async_scheduling=overlap)
    requests = [
        request_of(f"r{n}", 10 + n, params=params_of(n=1 + n % 3, temperature=1.0, seed=n))
        for n in range(20)
    ]

    found = await asyncio.gather(*(tokens_of(client, request) for request in requests))

    for request, tokens in zip(requests, found, strict=True):
        for choice in range(request.params.n):
            expected, _ = executor.model.generate(
                request.prompt_token_ids,
                request.params,
                choice=choice,
                eos=EOS,
                max_model_len=1000,
            )
            assert tokens[choice] == expected
    stats = (await client.call(STATS)).values
    assert stats["free_blocks"] == 24
    await client.close()


async def test_closing_a_stream_aborts():
    """A caller that goes away frees everything, also between two tokens."""
    client = client_of()
    params = params_of(max_tokens=900, ignore_eos=True)
    async with aclosing(client.stream(request_of("a", params=params))) as stream:
        async for _ in stream:
            break

    stats = (await client.call(STATS)).values
    assert (stats["running"], stats["free_blocks"]) == (0, 64)
    await client.close()


async def test_refusals_and_bad_parameters_are_raised():
    """Nothing is started for them; a key that lives is not taken twice."""
    executor = HeldExecutor(4)
    client = client_of(executor)
    with pytest.raises(InvalidParameter, match="temperature"):
        await tokens_of(client, request_of("a", params=params_of(temperature=-1.0)))
    with pytest.raises(RequestRefused, match="at most 64") as caught:
        await tokens_of(client, request_of("a", 100))
    assert caught.value.refusal.code is RefusalCode.NEVER_FITS

    first = asyncio.create_task(tokens_of(client, request_of("a")))
    await asyncio.to_thread(executor.entered.wait, WAIT)
    second = asyncio.create_task(tokens_of(client, request_of("a")))
    await asyncio.sleep(0)
    executor.go.set()
    with pytest.raises(RequestRefused):
        await second
    assert (await first)[0]
    await client.close()


async def test_one_engine_has_no_ways_to_choose():
    """A canary's wish that nothing here can grant is refused; when a request came is no wish."""
    client = client_of()
    asked = RequestContext(route=Route(shape=Shape.DISAGGREGATED))
    with pytest.raises(InvalidParameter, match="route"):
        await anext(client.stream(request_of("a"), asked))
    came = RequestContext(arrived=0.0)
    assert (await anext(client.stream(request_of("b"), came))).choice == 0
    await client.close()


async def test_spent_budgets_raise():
    """A request whose budget ends before it does fails with TIMEOUT."""
    client = client_of()
    params = params_of(max_tokens=None, ignore_eos=True)
    with pytest.raises(RequestFailed) as caught:
        await tokens_of(client, request_of("a", params=params, budget_ms=1))

    assert caught.value.cause is FailCause.TIMEOUT
    await client.close()


async def test_a_choice_may_end_in_the_step_that_refuses_its_request(monkeypatch):
    """The stream ends with what came last, and the engine serves on."""
    client = client_of()
    core, step = client._core, client._core.step
    refusal = Refusal(code=RefusalCode.INVALID, message="no tokens fit")

    def refusing() -> StepOutputs:
        said = step()
        request_table = core.scheduler.request_table
        if any(each.finish is not None for told in said.outputs.values() for each in told):
            for group in list(request_table.groups.values()):
                request_table.refuse(group, refusal, 0.0)
            request_table.sweep()
            said.refused = request_table.outbox.take_refused()
        return said

    monkeypatch.setattr(core, "step", refusing)
    params = params_of(n=2, max_tokens=4, ignore_eos=True)
    ended: dict[int, bool] = {}

    async def listen() -> None:
        request = request_of("a", params=params, emitted=((1, 2, 3), (1,)))
        async for output in client.stream(request):
            ended[output.choice] = output.finish is not None

    with pytest.raises(RequestRefused, match="no tokens fit"):
        await asyncio.wait_for(listen(), WAIT)
    assert ended == {0: True, 1: False}
    monkeypatch.undo()
    assert await tokens_of(client, request_of("b"))
    await client.close()


async def test_a_failing_engine_tells_everybody():
    """What the executor raised ends all streams with it, and refuses what comes after."""
    executor = HeldExecutor()
    client = client_of(executor)
    tasks = [asyncio.create_task(tokens_of(client, request_of(name))) for name in "ab"]
    await asyncio.to_thread(executor.entered.wait, WAIT)
    executor.error = RuntimeError("the device is gone")
    executor.go.set()

    for task in tasks:
        with pytest.raises(RequestFailed, match="the device is gone") as caught:
            await task
        assert caught.value.cause is FailCause.INTERNAL
    with pytest.raises(RequestFailed, match="the device is gone"):
        await tokens_of(client, request_of("c"))
    with pytest.raises(RequestFailed):
        await client.call(STATS)
    await client.close()


async def test_closing_ends_what_runs():
    """Callers hear that the engine was closed; closing twice is allowed."""
    client = client_of(PacedExecutor(64))
    params = params_of(max_tokens=None, ignore_eos=True)
    stream = client.stream(request_of("a", params=params))
    await anext(stream)

    await client.close()
    await client.close()
    with pytest.raises(RequestFailed, match="closed") as caught:
        async for _ in stream:
            pass
    assert caught.value.cause is FailCause.DRAINING


async def test_what_was_posted_last_is_answered():
    """A request that reaches the thread as it ends is told so, not left waiting."""
    executor = HeldExecutor()
    client = client_of(executor)
    first = asyncio.create_task(tokens_of(client, request_of("a")))
    await asyncio.to_thread(executor.entered.wait, WAIT)
    late = asyncio.create_task(tokens_of(client, request_of("b")))
    stats = asyncio.create_task(client.call(STATS))
    await asyncio.sleep(0)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    executor.go.set()
    await closing

    for task in (first, late):
        with pytest.raises(RequestFailed):
            await task
    assert (await stats).ok


async def test_the_card_is_known_at_once():
    """``describe`` does not wait for a step."""
    client = client_of(served_model_name="tiny")

    assert (await client.describe()).model == "tiny"
    client.wake()
    await client.close()


async def test_a_closed_loop_frees_its_requests():
    """Requests of a loop that is gone do not run on for nobody."""
    client = client_of(PacedExecutor(64))
    params = params_of(max_tokens=None, ignore_eos=True)
    stream = client.stream(request_of("a", params=params, budget_ms=60_000))

    def elsewhere() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(anext(stream))
        loop.close()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join, WAIT)
    async with asyncio.timeout(WAIT):
        while (stats := await client.call(STATS)).values["running"]:
            pass
    assert stats.values["free_blocks"] == stats.values["total_blocks"]
    await client.close()


@pytest.mark.parametrize("broken", [False, True])
async def test_a_closed_loop_does_not_keep_the_executor(broken, monkeypatch):
    """Its streams leave while everybody is told of the end; whatever that meets, the executor
    stops."""
    executor = HeldExecutor()
    client = client_of(executor)
    first = asyncio.create_task(tokens_of(client, request_of("a")))
    await asyncio.to_thread(executor.entered.wait, WAIT)
    stream, tasks = client.stream(request_of("b")), list[Any]()

    def elsewhere() -> None:
        loop = asyncio.new_event_loop()
        tasks.append(loop.create_task(anext(stream)))
        loop.run_until_complete(asyncio.sleep(0))
        tasks[0]._log_destroy_pending = False
        loop.close()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join, WAIT)
    if broken:
        monkeypatch.setattr(client._core, "abort", lambda key: 1 / 0)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    executor.go.set()
    await closing
    assert executor.stopped
    if not broken:
        with pytest.raises(RequestFailed, match="closed"):
            await first
    first.cancel()


async def test_a_hung_engine_is_a_timeout(monkeypatch):
    """A command that is not answered in time says so."""
    monkeypatch.setattr("tandem.engine.core.client.CALL_SECONDS", 0.01)
    monkeypatch.setattr("tandem.engine.core.client.JOIN_SECONDS", 0.01)
    executor = HeldExecutor()
    client = client_of(executor)
    task = asyncio.create_task(tokens_of(client, request_of("a")))
    await asyncio.to_thread(executor.entered.wait, WAIT)

    with pytest.raises(RequestFailed, match="did not answer stats"):
        await client.call(STATS)
    await client.close()
    executor.go.set()
    with pytest.raises(RequestFailed):
        await task
