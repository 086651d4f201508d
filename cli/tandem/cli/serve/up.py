"""`tandem up`: a whole stack on this machine, supervised in the foreground.

Address, flags and model are checked before any process starts. Processes that die are restarted;
none is left at the end.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.cli.serve.child_flags import (
    check_host,
    check_kept,
    check_router,
    check_worker,
    named,
)
from tandem.cli.serve.children import Child
from tandem.cli.serve.gpus import (
    SHARE,
    Turns,
    check_shares,
    sharers,
    visible_gpus,
)
from tandem.cli.serve.listening import check_address, free_ports
from tandem.cli.serve.overrides import (
    ROLES,
    Overrides,
    described,
    environment_of,
    of_router,
    sections_for,
    take_roles,
)
from tandem.cli.serve.stack import (
    PORTS_PER_WORKER,
    READY_SECONDS,
    Graces,
    UpConfig,
    plan,
    router_url,
    stop,
)
from tandem.cli.serve.stack_dump import dump_on_signal
from tandem.cli.settings.command import parse
from tandem.cli.settings.flags import Section
from tandem.cli.settings.logs import set_up_logging
from tandem.cli.settings.secret_flags import ENV_API_KEY
from tandem.engine.config import ModelFacts
from tandem.engine.config.engine import resolve_device
from tandem.engine.config.servable import check_model
from tandem.hub.folder import ModelFiles
from tandem.hub.source import served_name
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.mapped.wire import open_folder
from tandem.protocol.messages import step_bound
from tandem.protocol.names import ENV_PREFIX
from tandem.router.config import RouterConfig
from tandem.text.folder import DEFAULT_TEMPLATE, read_settings

_QUESTION = "What is the capital of France?"


def example(facts: ModelFacts, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request for the model, without its name."""
    pooling = facts.pooling
    if pooling.generates and DEFAULT_TEMPLATE in read_settings(folder).chat_templates:
        messages = [{"role": "user", "content": _QUESTION}]
        return "/v1/chat/completions", {"messages": messages, "temperature": 0}
    if pooling.generates:
        return "/v1/completions", {"prompt": "The capital of France is", "temperature": 0}
    if len(pooling.labels) == 1:
        documents = ["Paris is the capital of France.", "Bread is made of flour."]
        return "/v1/rerank", {"query": _QUESTION, "documents": documents}
    if pooling.labels:
        return "/classify", {"input": _QUESTION}
    return "/v1/embeddings", {"input": _QUESTION}


def greeting(url: str, name: str, request: tuple[str, dict[str, Any]], *, has_keys: bool) -> str:
    """Return the lines that show ``request`` as a command."""
    path, body = request
    key = f' \\\n    -H "Authorization: Bearer ${ENV_API_KEY}"' if has_keys else ""
    text = json.dumps({"model": name, **body}, ensure_ascii=False).replace("'", "'\\''")
    return (
        f"\n  curl {url}{path} -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{text}'\n\n  Ctrl-C stops everything.\n"
    )


def bound_steps(
    router: RouterConfig,
    given: Mapping[str, Mapping[str, Any]],
    flags: Mapping[str, Sequence[str]],
) -> dict[str, Sequence[str]]:
    """Return ``flags`` by role, with ``--max-itl-ms`` for GPU workers without a bound.

    ``given`` are the engine settings by role. Nothing is added without both roles.
    """
    bounded = dict(flags)
    if router.strict_handoff or not {"prefill", "decode"} <= given.keys():
        return bounded
    for role, settings in given.items():
        more = step_bound(router.target_itl_ms, settings)
        if more and resolve_device(settings.get("device", "auto")) == "cuda":
            bounded[role] = [*flags.get(role, ()), *more]
    return bounded


POLL_SECONDS = 0.25
ENV_SECRET = ENV_PREFIX + "KV_SECRET"
ENV_FOLDER = ENV_PREFIX + "KV_NODE_FOLDER"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(argv: list[str]) -> int:
    """Run until a signal. Return 1 if the stack could not serve or a part died too often."""
    sections = [Section("Stack", UpConfig), *sections_for(ROLES)]
    words, roles = take_roles(of_router("up", argv, sections), ROLES)
    given = parse("up", described(__doc__, ROLES), sections, words)
    overrides = Overrides(environment=environment_of(given, UpConfig, ModelFiles), flags=roles)
    files = ModelFiles(**given[ModelFiles])
    return Supervisor(UpConfig(**given[UpConfig]), overrides, files).run()


class Supervisor:
    """Children of one stack, and the loop that watches them."""

    def __init__(
        self,
        config: UpConfig,
        overrides: Overrides | None = None,
        files: ModelFiles | None = None,
    ) -> None:
        self.config = config
        self._files = files
        self.overrides = overrides if overrides is not None else Overrides()
        self.children: list[Child] = []
        self._due: list[Child] = []
        """Children to start as soon as they may."""
        self._engines: dict[str, dict[str, Any]] = {}
        self._facts: ModelFacts | None = None
        self._request: tuple[str, dict[str, Any]] | None = None
        """Request that the model can answer."""
        self._has_keys = False
        self._turns = Turns()
        self._stop = threading.Event()
        self._hurried = threading.Event()
        self._interruptible = True

    def run(self) -> int:
        """Check, prepare, start, watch and stop the stack."""
        set_up_logging(self.config.log_level)
        dump_on_signal()
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)  # unless nohup ignores it
        check_address(self.config.host, self.config.port)
        graces, dummy = self.check_flags()
        path, names = self._prepare(dummy)
        self._interruptible = False
        check_address(self.config.host, self.config.port)
        self.children = self._plan(path, names)
        try:
            return self._serve(names[0])
        finally:
            self._say("stopping")
            stop(self.children, graces, hurried=self._hurried.is_set, say=self._say)
            self._say("all processes have ended")

    def _serve(self, name: str) -> int:
        started = time.monotonic()  # without the model's preparation
        for line in self._turns.described():
            self._say(line)
        self._due = list(self.children)
        self._start_due()
        if not self._wait_ready(started):
            return 0 if self._stop.is_set() else 1
        self._greet(name)
        return self._watch()

    def _start_due(self) -> list[Child]:
        """Start the due children whose turn it is, and return them."""
        started: list[Child] = []
        for child in self._due:
            if self._turns.admit(child):
                child.start(sys.stderr)
                started.append(child)
        self._due = [child for child in self._due if child not in started]
        return started

    def check_flags(self) -> tuple[Graces, bool]:
        """Check all flags. Return the drain times, and whether the weights are dummy ones."""
        config = self.config
        environ = {key: value for key, value in os.environ.items() if key != ENV_PREFIX + "CONFIG"}
        count = PORTS_PER_WORKER * (config.prefill + config.decode)
        drains, dummy, router = [0.0], False, RouterConfig()
        engines = self._engines
        planned = plan(config, config.model, ("model",), [1] * count, [], self.overrides)
        for child in planned:
            role, *flags = child.arguments
            check_kept(role, flags)
            if role == "router":
                router = check_router(flags, {**environ, **child.environment})
            else:
                server, engine = check_worker(role, flags, {**environ, **child.environment})
                check_host(role, server.host)
                drains.append(server.drain_seconds)
                dummy = dummy or engine.get("load_format") == "dummy"
                engines[role] = engine
        if any(SHARE in each for each in engines.values()):  # else the driver is not required
            check_shares(sharers(planned, visible_gpus(), engines))
        self._has_keys = bool(router.api_key or router.api_keys_dir)
        bounded = bound_steps(router, engines, self.overrides.flags)
        self.overrides = replace(self.overrides, flags=bounded)
        return Graces(router.drain_timeout, max(drains)), dummy

    def _prepare(self, dummy: bool) -> tuple[str, tuple[str, ...]]:
        from tandem.hub import prepare

        config = self.config

        def check(folder: Path) -> None:
            for role, engine in self._engines.items():
                with named(role):
                    self._facts = check_model(folder, engine)

        prepared = prepare(
            config.model,
            revision=config.revision,
            weights=not dummy,
            check=check,
            files=self._files,
        )
        self._say(f"model {prepared.source}: {prepared.path}")
        if self._facts is not None:
            self._request = example(self._facts, prepared.path)
        return str(prepared.path), config.served_model_name or (served_name(prepared.source),)

    def _plan(self, path: str, names: Sequence[str]) -> list[Child]:
        config = self.config
        count = PORTS_PER_WORKER * (config.prefill + config.decode)
        ports = free_ports(count, but={config.port})
        gpus = visible_gpus()
        children = plan(config, path, names, ports, gpus, self.overrides)
        shared = sharers(children, gpus, self._engines)
        self._turns = Turns(shared, patience=READY_SECONDS)
        meeting = meeting_folder() if gpus and config.prefill and config.decode else {}
        secret = os.environ.get(ENV_SECRET) or secrets.token_hex(32)
        for child in children:  # by the environment: command lines are public
            child.environment = {ENV_SECRET: secret, **meeting, **child.environment}
        return children

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._interruptible:
            raise KeyboardInterrupt
        if self._stop.is_set():
            self._hurried.set()
            for child in self.children:
                child.signal(signal.SIGKILL)
        self._stop.set()

    def _wait_ready(self, started: float) -> bool:
        deadline = started + READY_SECONDS
        waiting = list(self.children)
        while waiting and not self._stop.wait(POLL_SECONDS):
            if self._start_due():
                deadline = time.monotonic() + READY_SECONDS
            for child in self.children:
                if child.exit_code is not None:
                    when = "before it served" if child in waiting else "while others started"
                    self._say(f"{child.name} ended with status {child.exit_code} {when}")
                    return False
            for child in list(waiting):
                if child not in self._due and child.check_ready():
                    waiting.remove(child)
                    self._say(f"{child.name} ready after {time.monotonic() - child.started:.1f} s")
            if time.monotonic() > deadline:
                names = ", ".join(child.name for child in waiting)
                self._say(f"not ready within {READY_SECONDS:g} s: {names}")
                return False
        return not waiting

    def _greet(self, name: str) -> None:
        url = router_url(self.config.host, self.config.port)
        self._say(f"serving {name} at {url}")
        if self._request is not None:
            print(greeting(url, name, self._request, has_keys=self._has_keys), flush=True)

    def _watch(self) -> int:
        while not self._stop.wait(POLL_SECONDS):
            for child in self.children:
                if child.exit_code is None or child in self._due:
                    continue
                self._say(f"{child.name} ended with status {child.exit_code}")
                if not child.may_restart(time.monotonic()):
                    self._say(f"{child.name} ends too often: giving up")
                    return 1
                self._due.append(child)
            for child in self._start_due():
                self._say(f"{child.name} restarted")
        return 0

    def _say(self, text: str) -> None:
        with suppress(OSError):  # the terminal may be closed: processes still have to end
            print(f"tandem | {text}", flush=True)


def meeting_folder() -> dict[str, str]:
    """Return the environment for copies of KV between GPUs of this machine."""
    if ENV_FOLDER in os.environ:
        return {}
    try:
        return {ENV_FOLDER: str(open_folder(None))}
    except TransportError as error:
        print(f"tandem | KV is not copied from GPU to GPU: {error}", flush=True)
        return {}
