"""A whole worker but for its model: the shell's loop over a real engine, a socket, and probes."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue

import pytest
from prometheus_client import CollectorRegistry
from tests.engine_plan.builders import config_of, params_of, request_of
from tests.workers.hand_router import Router

from tandem.engine.core.engine_core import EngineCore
from tandem.engine.core.engine_proc import EngineCoreProc, WorkerProbes
from tandem.engine.core.io import Inbox
from tandem.engine.core.role import Standalone
from tandem.engine.core.server_config import ServerConfig
from tandem.engine.executor.sim import SimExecutor
from tandem.engine.metrics import EngineMetrics
from tandem.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from tandem.protocol.card import WorkerRole
from tandem.protocol.commands import Command, CommandName
from tandem.protocol.errors import RefusalCode
from tandem.protocol.ids import new_incarnation
from tandem.protocol.messages import (
    Call,
    Cancel,
    Draining,
    Frame,
    PeerSet,
    ReplyTo,
    Submit,
    WorkerBeat,
)
from tandem.protocol.requests import EngineCoreRequest


class PacedExecutor(SimExecutor):
    """Two milliseconds a step: long requests are still under way when they are disturbed."""

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """See SimExecutor."""
        time.sleep(0.002)
        return super().execute(plan)


class Worker:
    """An EngineCoreProc in a thread."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        server = ServerConfig(host="127.0.0.1", port=0, probe_port=0)
        self.probes = WorkerProbes(server, registry)
        self.inbox: Inbox = SimpleQueue()
        metrics = EngineMetrics(registry, model_name="sim", max_model_len=4096)
        self.executor = PacedExecutor(64)
        config = config_of(num_gpu_blocks_override=64)
        self.core = EngineCore.launch(config, self.executor, metrics=metrics)
        self.loading = self.get("/ready")
        self.proc = EngineCoreProc(
            core=self.core,
            role=Standalone(),
            card=self.core.card(role=WorkerRole.DECODE, incarnation=new_incarnation()),
            server=server,
            probes=self.probes,
            inbox=self.inbox,
            registry=registry,
        )
        self.status: list[int] = []
        self.thread = threading.Thread(target=lambda: self.status.append(self.proc.run()))
        self.thread.start()

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a probe."""
        url = f"http://127.0.0.1:{self.probes.port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def end(self, grace: float = 0.0) -> int:
        """Stop, and the exit status."""
        self.proc.stop(grace)
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.status[0]


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A worker that is ended whatever happened."""
    made = Worker()
    yield made
    if made.thread.is_alive():
        made.end()
    made.probes.close()


@pytest.fixture
def router(worker: Worker) -> Iterator[Router]:
    """A router that has greeted."""
    made = Router(worker.proc.endpoint)
    made.greet()
    yield made
    made.socket.close()


def submit(router: Router, name: str, **fields: object) -> EngineCoreRequest:
    """Send a request of this router."""
    request = request_of(name, router=router.link.me, **fields)  # type: ignore[arg-type]
    router.say(Submit(request))
    return request


def started(router: Router) -> None:
    """Wait for the first token of what was submitted."""
    while not router.hear(Frame).outputs:
        pass


def frames(router: Router, name: str) -> tuple[list[int], Frame]:
    """Tokens of a request until its last frame, which comes along."""
    tokens: list[int] = []
    while True:
        frame = router.hear(Frame)
        assert isinstance(frame, Frame)
        for output in frame.outputs:
            assert output.request == name
            assert output.position == len(tokens)
            tokens += output.token_ids
            if output.finish is not None:
                return tokens, frame
        if frame.failed or frame.refused:
            return tokens, frame


def test_a_request_is_accepted_and_answered(worker: Worker, router: Router) -> None:
    """Tokens come in order with their positions, and equal those of the model alone."""
    request = submit(router, "a")
    tokens, _ = frames(router, "a")

    expected = worker.executor.model.generate(
        request.prompt_token_ids, request.params, eos=request.eos_token_ids, max_model_len=4096
    )
    assert tokens == list(expected[0])


def test_probes_tell_loading_from_serving_from_draining(worker: Worker, router: Router) -> None:
    """Not ready before the engine is up, ready then, and not while it leaves."""
    assert worker.loading[0] == 503
    assert worker.get("/health")[0] == 200
    assert worker.get("/ready")[0] == 200
    submit(router, "long", params=params_of(max_tokens=3000))
    started(router)
    worker.proc.stop(5.0)

    assert worker.get("/ready") == (503, '{"status": "draining"}\n')
    assert worker.get("/health")[0] == 200


def test_debug_metrics_and_unknown_paths(worker: Worker, router: Router) -> None:
    """What an operator looks at answers while the worker serves."""
    submit(router, "a")
    frames(router, "a")

    assert json.loads(worker.get("/debug")[1])["state"] == "serving"
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
    """An exception in a step fails its requests; the exit status tells."""
    worker.executor.stop()
    worker.executor.execute = None  # type: ignore[assignment,method-assign]
    submit(router, "a")
    while not router.hear(Frame).failed:
        pass

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
