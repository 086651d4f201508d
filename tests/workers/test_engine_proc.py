"""A whole worker but for its model: the shell's loop over a real engine, a socket, and probes."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future

import pytest
from tests.engine_plan.builders import config_of, params_of
from tests.engine_plan.handoff import ConsumerSide
from tests.engine_plan.sim import SimExecutor
from tests.workers.hand_router import Router
from tests.workers.proc_worker import Worker, frames, started, submit

from tandem.engine.core.engine_core import EngineCore
from tandem.engine.step import ModelRunnerOutput, SchedulerOutput
from tandem.link.liveness import LinkTimes, Liveness
from tandem.protocol.commands import Command, CommandName
from tandem.protocol.errors import FailCause, RefusalCode
from tandem.protocol.ids import new_incarnation
from tandem.protocol.messages import (
    Beat,
    Call,
    Cancel,
    Draining,
    Frame,
    PeerSet,
    ReplyTo,
    WorkerBeat,
)
from tandem.protocol.outputs import FinishReason, PooledOutput
from tandem.protocol.pooling import NO_SAMPLING, PoolingParams
from tandem.protocol.requests import Consume
from tandem.protocol.structured import StructuredOutputsParams


def test_a_request_is_accepted_and_answered(worker: Worker, router: Router) -> None:
    """Tokens come in order with their positions, and equal those of the model alone."""
    request = submit(router, "a")
    tokens, _ = frames(router, "a")

    expected = worker.executor.model.generate(
        request.prompt_token_ids, request.params, eos=request.eos_token_ids, max_model_len=4096
    )
    assert tokens == list(expected[0])


def test_a_vector_comes_over_the_link(worker: Worker, router: Router) -> None:
    """Whole, in one frame with its end, and no token with it."""
    request = submit(router, "a", params=NO_SAMPLING, pooling=PoolingParams())
    frame = router.hear(Frame)
    while not frame.outputs:
        frame = router.hear(Frame)
    (output,) = frame.outputs
    assert isinstance(output, PooledOutput)
    assert output.finish is FinishReason.STOP
    assert output.num_prompt_tokens == len(request.prompt_token_ids)
    assert len(output.vector) == 1
    submit(router, "b")
    assert frames(router, "b")[0]


def test_probes_tell_loading_from_serving_from_draining(worker: Worker, router: Router) -> None:
    """Not ready before the engine is up, ready from then on, also while it leaves."""
    assert worker.loading[0] == 503
    assert worker.get("/health")[0] == 200
    assert worker.get("/ready")[0] == 200
    submit(router, "long", params=params_of(max_tokens=3000))
    started(router)
    worker.proc.stop(5.0)

    assert worker.get("/ready")[0] == 200
    assert json.loads(worker.get("/debug")[1])["state"] == "draining"
    assert worker.get("/health")[0] == 200


def test_debug_metrics_and_unknown_paths(worker: Worker, router: Router) -> None:
    submit(router, "a")
    frames(router, "a")

    worker.probes.tell_keys(lambda: ["decode.1"])
    debug = json.loads(worker.get("/debug")[1])
    assert (debug["state"], debug["keys"]) == ("serving", ["decode.1"])
    assert "vllm:generation_tokens_total" in worker.get("/metrics")[1]
    assert worker.get("/nothing")[0] == 404


def test_a_request_used_twice_is_refused(worker: Worker, router: Router) -> None:
    """The second of two equal keys is turned away, the first goes on."""
    submit(router, "long", params=params_of(max_tokens=2000, ignore_eos=True))
    started(router)
    submit(router, "long")
    while not (frame := router.hear(Frame)).refused:
        pass

    assert frame.refused[0].refusal.code is RefusalCode.DUPLICATE


def test_a_cancelled_request_frees_its_blocks(worker: Worker, router: Router) -> None:
    """After CANCEL the engine has no work and no block held."""
    submit(router, "long", params=params_of(max_tokens=3000, ignore_eos=True))
    started(router)
    router.say(Cancel("long", 0))
    router.say(Call(Command(id=1, name=CommandName.STATS)))
    reply = router.hear(ReplyTo)

    assert isinstance(reply, ReplyTo)
    assert reply.reply.values["running"] == 0
    assert reply.reply.values["free_blocks"] == reply.reply.values["total_blocks"]


def test_hole_16_a_lost_router_loses_its_requests(worker: Worker, router: Router) -> None:
    """Nobody reads them any more: they are dropped, others go on."""
    submit(router, "long", params=params_of(max_tokens=3000, ignore_eos=True))
    started(router)
    router.link.seal()
    router.say(Cancel("other", 0))  # a gap in the sequence
    again = Router(worker.proc.endpoint)
    again.greet()
    again.say(Call(Command(id=2, name=CommandName.STATS)))
    reply = again.hear(ReplyTo)

    assert isinstance(reply, ReplyTo)
    assert reply.reply.values["running"] == 0
    again.socket.close()


def test_a_new_router_hears_of_the_cache(worker: Worker, router: Router) -> None:
    """Its index starts with what is cached already."""
    submit(router, "a", prompt=40)
    frames(router, "a")
    newcomer = Router(worker.proc.endpoint)
    newcomer.greet()
    frame = newcomer.hear(Frame)

    assert isinstance(frame, Frame)
    assert frame.blocks is not None
    assert frame.blocks.cleared
    assert len(frame.blocks.stored) >= 2
    newcomer.socket.close()


def test_a_drain_finishes_what_runs(worker: Worker, router: Router) -> None:
    """The router is told, the running request ends well, then the worker ends."""
    submit(router, "a", params=params_of(max_tokens=300, ignore_eos=True))
    started(router)
    worker.proc.stop(20.0)
    told = finished = False
    while not (told and finished):
        message = router.hear(Frame | Draining)
        told = told or isinstance(message, Draining)
        finished = finished or (
            isinstance(message, Frame) and any(output.finish for output in message.outputs)
        )

    worker.thread.join(10)
    assert worker.status == [0]


def test_what_outlasts_the_grace_is_failed_by_name(worker: Worker, router: Router) -> None:
    """The router learns that it must go on elsewhere."""
    submit(router, "long", params=params_of(max_tokens=3500, ignore_eos=True))
    started(router)
    worker.proc.stop(0.0)
    while not (frame := router.hear(Frame)).failed:
        pass

    assert frame.failed[0].request == "long"
    worker.thread.join(10)
    assert worker.status == [0]


def test_a_broken_engine_ends_the_worker_and_says_so(worker: Worker, router: Router) -> None:
    """An exception in a step fails its requests, and is no drain; the exit status tells."""
    worker.executor.stop()
    worker.executor.execute = None  # type: ignore[assignment,method-assign]
    submit(router, "a")
    _, frame = frames(router, "a")
    assert [each.cause for each in frame.failed] == [FailCause.WORKER_LOST]

    worker.thread.join(10)
    assert worker.status == [1]
    assert worker.get("/health")[0] == 503


def test_peers_and_beats_pass_through(worker: Worker, router: Router) -> None:
    """A worker without hand-off takes note of nothing, and beats."""
    router.say(PeerSet({"127.0.0.1:1": new_incarnation()}))
    beat = router.hear(WorkerBeat)

    assert isinstance(beat, WorkerBeat)
    assert beat.load.total_blocks == 64
    assert beat.peers == ()


def test_a_long_step_does_not_hide_that_a_request_was_accepted(
    worker: Worker, router: Router
) -> None:
    """The step loop leaves the word to the I/O thread, which says it whatever the loop does."""
    execute = worker.executor.execute
    ended, heard = threading.Event(), list[bool]()

    def slow(plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        heard.append(ended.wait(10))
        return execute(plan)

    worker.executor.execute = slow  # type: ignore[method-assign]
    submit(router, "a")
    while not any(each.request == "a" for each in router.hear(Frame).accepted):
        pass
    ended.set()
    frames(router, "a")
    assert all(heard)


def test_what_turns_out_wrong_after_it_was_taken_is_refused(worker: Worker, router: Router) -> None:
    """A request is accepted before its grammar is compiled; here no grammar can be, and the words
    come as a refusal, at once: the thread that found out wakes the loop."""
    wanted = StructuredOutputsParams(regex="a")
    submit(router, "a", params=params_of(structured_outputs=wanted))
    accepted: list[str] = []
    while not (frame := router.hear(Frame)).refused:
        accepted += [each.request for each in frame.accepted]

    assert accepted == ["a"]
    (refused,) = frame.refused
    assert refused.refusal.code is RefusalCode.UNSUPPORTED
    assert refused.refusal.message == "no structured output here: sim has no tokenizer.json"
    submit(router, "b")
    assert frames(router, "b")[0]


@pytest.mark.full
def test_waiting_for_peers_is_no_standstill_and_a_loop_that_hangs_is() -> None:
    """A decode worker all of whose requests wait for a prefill worker that is busy is alive for as
    long as its loop comes round."""
    core = EngineCore.launch(
        config_of(num_gpu_blocks_override=64),
        SimExecutor(64),
        connect=lambda _capacity: ConsumerSide(),
    )
    worker = Worker(core)
    router = Router(worker.proc.endpoint)
    hangs, ends = threading.Event(), threading.Event()
    observe = core.observe

    def hang() -> None:
        if hangs.is_set():
            ends.wait(30)
        observe()

    core.observe = hang  # type: ignore[method-assign]
    try:
        router.greet()
        submit(router, "a", kv=Consume(new_incarnation()))
        while not (beat := router.hear(WorkerBeat)).beat.has_work:
            pass
        assert judged(router, beat) is None
        hangs.set()
        router.hear(WorkerBeat)  # the loop may have come round before it
        assert judged(router, router.hear(WorkerBeat)) is not None
    finally:
        ends.set()
        worker.end()
        worker.probes.close()
        router.socket.close()


def judged(router: Router, beat: WorkerBeat) -> str | None:
    """What a router thinks of a worker whose next beat comes two minutes after this one."""
    alive = Liveness(LinkTimes(beat_timeout=1000.0, stall_timeout=119.0))
    alive.progress(0.0, beat.beat)
    router.say(Beat())
    beat = router.hear(WorkerBeat)
    assert beat.load.num_waiting == 1
    alive.progress(120.0, beat.beat)
    return alive.overdue(120.0)
