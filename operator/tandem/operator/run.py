"""The operator's process: wait for the Lease, then watch, list and reconcile until a signal.

A standby runs only the election and the probes.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

from prometheus_client import CONTENT_TYPE_LATEST

from tandem.base.listening import (
    ANY_6,
    family_of,
    listening_host,
    take_both_families,
)
from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.apply import Applier
from tandem.operator.cluster.fence import Fence
from tandem.operator.cluster.repair import Repairs
from tandem.operator.cluster.store import CHILDREN, Mirror, Store
from tandem.operator.cluster.undeclared import Undeclared
from tandem.operator.look import Trigger
from tandem.operator.loop import queue as queues
from tandem.operator.loop import watch
from tandem.operator.loop.leader import LONGEST_CALL, Leader
from tandem.operator.loop.queue import WorkQueue
from tandem.operator.loop.resync import Resync
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.probes.keywatch import KeyWatch
from tandem.operator.probes.probing import Probes
from tandem.operator.probes.reach import Reach
from tandem.operator.probes.refusals import Refusals
from tandem.operator.reconcile.reconciler import Reconciler
from tandem.operator.reconcile.traced import Tracer
from tandem.operator.service_gauges import ServiceGauges
from tandem.operator.settings import OperatorSettings, usual_pod_host
from tandem.protocol.names import ENV_POD_NAMESPACE
from tandem.tracing.spans import Spans

Check = Callable[[], str | None]
"""Returns None, or a problem."""


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        host = listening_host(ANY_6)
        self.address_family = family_of(host)
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Bind without a DNS lookup of this machine's name, which may be slow."""
        take_both_families(self.socket)
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]


class Server:
    """Server of probes and metrics: binds at once, serves from ``start`` on."""

    def __init__(self, port: int, metrics: OperatorMetrics, alive: Check, ready: Check) -> None:
        checks = {"/livez": alive, "/readyz": ready}
        handler = type("Handler", (_Handler,), {"checks": checks, "metrics": metrics})
        try:
            self._server = _Listener(port, handler)
        except OSError as error:
            raise OSError(f"cannot listen on port {port}: {error}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="probes", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    checks: dict[str, Check]
    metrics: OperatorMetrics
    timeout = 5

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, self.metrics.text(), CONTENT_TYPE_LATEST)
        elif path in self.checks:
            problem = self.checks[path]()
            self._answer(200 if problem is None else 503, f"{problem or 'ok'}\n".encode())
        else:
            self._answer(404, b"/livez /readyz /metrics\n")

    def _answer(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name it overrides
        """Drop the log line."""


logger = logging.getLogger(__name__)

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
LEASE_TIMEOUT = 4.0
STALE_LISTS = 3
"""Failed periodic lists in a row after which the process counts as dead."""
CRD_WAIT = 2.0
FINISH_SECONDS = 15.0


class Operator:
    """Replica of the operator."""

    def __init__(self, settings: OperatorSettings) -> None:
        self._settings = settings
        self._metrics = OperatorMetrics(CHILDREN)
        self._queue = WorkQueue(self._metrics)
        fence = Fence()
        self._store = Store()
        self._metrics.registry.register(ServiceGauges(self._store))
        self._cluster = Mirror(self._store, fence=fence)
        longest = settings.renew_deadline * LONGEST_CALL
        lease = Cluster(pool=1, timeout=min(LEASE_TIMEOUT, longest))
        self._leader = Leader(lease, settings, fence=fence)
        self._tracer = Tracer(_spans(settings, self._leader.identity))
        because = self._queue.because
        self._resync = Resync(
            self._cluster, self._store, settings, because(Trigger.RESYNC), self._metrics
        )
        self._stop = threading.Event()
        self._server = Server(settings.port, self._metrics, self._alive, self._ready)

    def run(self) -> int:
        """Run until SIGTERM or SIGINT (0), or until kopf or a thread ends (1)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        self._server.start()
        self._leader.start()
        status = 0
        try:
            while not self._stop.is_set() and not self._leader.acquired.wait(0.2):
                pass
            if not self._stop.is_set():
                status = self._lead()
        finally:
            self._stop.set()
            self._leader.release()
            self._server.stop()
            self._tracer.close()
        return status

    def _lead(self) -> int:
        self._metrics.leader.set(1)
        self._await_crds()
        because = self._queue.because
        beside = self._tracer.beside
        probes = Probes(self._settings.canary_seconds, because(Trigger.CANARY))
        applier = Applier(self._cluster)
        repairs = Repairs(
            self._cluster, applier, because(Trigger.CHILD), self._metrics, partial(beside, "repair")
        )
        keywatch = KeyWatch(self._cluster, because(Trigger.KEYS))
        refusals = Refusals(because(Trigger.REFUSALS))
        silence = self._settings.router_silence_seconds
        reach = Reach(
            self._cluster,
            because(Trigger.REACH),
            self._metrics,
            silence,
            partial(beside, "take out"),
        )
        reconciler = Reconciler(
            self._cluster,
            self._store,
            self._settings,
            probes,
            applier,
            repairs,
            keywatch,
            refusals,
            reach,
            Undeclared(self._metrics.undeclared_fields.set),
        )
        listing = _thread(self._resync.run, self._stop)
        while not self._stop.is_set() and not self._resync.filled.wait(0.2):
            pass  # incomplete data is not used
        look = self._tracer.looks(reconciler, self._queue.why)
        working = [
            _thread(queues.work, self._queue, look, self._metrics)
            for _ in range(self._settings.workers)
        ]
        working.append(listing)
        events = watch.WatchEvents(
            because(Trigger.SERVICE), repairs.child_changed, self._store, self._metrics
        )
        watching = _thread(watch.run, self._settings, events, self._stop, self._resync.served)
        try:
            while not self._stop.wait(0.2):
                over = ended({"watching": [watching], "looking at services": working})
                if over is not None and not self._stop.is_set():
                    logger.error("%s has ended", over)
                    return 1
            return 0
        finally:
            self._stop.set()
            self._queue.stop()
            for thread in working:  # a current look ends before the Lease is released
                thread.join(timeout=FINISH_SECONDS)
            probes.close()
            repairs.close()
            keywatch.close()
            refusals.close()
            reach.close()

    def _await_crds(self) -> None:
        """Wait until a served namespace answers. Other namespaces may be deleted."""
        while not any(map(self._has_crds, self._settings.namespaces or (None,))):
            if self._stop.wait(CRD_WAIT):
                return

    def _has_crds(self, namespace: str | None) -> bool:
        try:
            self._cluster.items("LLMService", namespace)
            self._cluster.items("LLMRoleScaler", namespace)
        except ClusterError as error:
            where = namespace or "the cluster"
            logger.warning("waiting for the custom resources in %s: %s", where, error)
            return False
        return True

    def _alive(self) -> str | None:
        if not self._leader.alive() and not self._stop.is_set():
            return "the election has ended"
        if not self._leader.acquired.is_set():
            return None
        age = self._resync.age()
        if age > STALE_LISTS * self._settings.resync_seconds:
            return f"the last good list is {age:.0f} s old"
        return None

    def _ready(self) -> str | None:
        return "stopping" if self._stop.is_set() else None


def _spans(settings: OperatorSettings, instance: str) -> Spans | None:
    """Return the sender of spans; None without an endpoint."""
    if settings.otlp_traces_endpoint is None:
        return None
    return Spans(
        settings,
        "tandem-operator",
        instance,
        begins_traces=True,
        namespace=settings.own_namespace,
    )


def ended(duties: Mapping[str, Sequence[threading.Thread]]) -> str | None:
    """Return a duty of which a thread has ended, or None.

    Another process must begin then.
    """
    dead = (duty for duty, threads in duties.items() if not all(t.is_alive() for t in threads))
    return next(dead, None)


def _thread(target: Callable[..., object], *arguments: object) -> threading.Thread:
    """Return a started daemon thread: kopf takes seconds to end."""
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def run(settings: OperatorSettings) -> int:
    """Run one replica; return the exit status."""
    own = os.environ.get(ENV_POD_NAMESPACE) or _own_namespace()
    host = usual_pod_host(os.environ)
    return Operator(replace(settings, own_namespace=own, pod_host=host)).run()


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        return "default"
