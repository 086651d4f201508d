"""A whole worker but for its model, in a thread, and short ways to talk to it."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future

from prometheus_client import CollectorRegistry
from tests.engine_plan.builders import config_of, request_of
from tests.engine_plan.sim import SimExecutor
from tests.workers.hand_router import Router

from tandem.engine.core.engine_core import EngineCore
from tandem.engine.metrics import EngineMetrics
from tandem.engine.step import ModelRunnerOutput, SchedulerOutput
from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import new_incarnation
from tandem.protocol.messages import (
    Frame,
    Submit,
)
from tandem.protocol.outputs import EngineCoreOutput
from tandem.protocol.requests import EngineCoreRequest
from tandem.worker.engine_proc import EngineCoreProc
from tandem.worker.handoff import HandoffService, NoHandoff
from tandem.worker.io import Inbox
from tandem.worker.server_config import ServerConfig
from tandem.worker.worker_probes import WorkerProbes


class PacedExecutor(SimExecutor):
    """Two milliseconds a step: long requests are still under way when they are disturbed."""

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        time.sleep(0.002)
        return super().execute(plan)


class Worker:
    def __init__(
        self,
        core: EngineCore | None = None,
        *,
        handoff: HandoffService | None = None,
        inbox: Inbox | None = None,
        **settings: object,
    ) -> None:
        """``core`` in place of a simulated engine; ``settings`` of that. ``handoff`` has links, and
        wakes the loop by ``inbox``."""
        registry = CollectorRegistry()
        server = ServerConfig(host="127.0.0.1", port=0, probe_port=0)
        self.probes = WorkerProbes(server, registry)
        self.inbox = inbox or Inbox()
        metrics = EngineMetrics(registry, model_name="sim", max_model_len=4096)
        self.executor = PacedExecutor(64)
        config = config_of(num_gpu_blocks_override=64, **settings)
        if core is None:
            core = EngineCore.launch(config, self.executor, metrics=metrics)
        self.core = core
        self.loading = self.get("/ready")
        self.proc = EngineCoreProc(
            core=self.core,
            handoff=handoff or NoHandoff(),
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
        url = f"http://127.0.0.1:{self.probes.port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def end(self, grace: float = 0.0) -> int:
        self.proc.stop(grace)
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.status[0]


def submit(router: Router, name: str, **fields: object) -> EngineCoreRequest:
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
            assert isinstance(output, EngineCoreOutput)
            assert output.request == name
            assert output.position == len(tokens)
            tokens += output.token_ids
            if output.finish is not None:
                return tokens, frame
        if frame.failed or frame.refused:
            return tokens, frame
