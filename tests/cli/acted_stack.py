"""A supervisor whose workers are no processes, for tests of who starts when and of shares."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TextIO

from tandem.cli.serve.children import Child
from tandem.cli.serve.gpus import ENV_SHARE, Turns, sharers
from tandem.cli.serve.stack import UpConfig
from tandem.cli.serve.up import Supervisor

ROLES = ("prefill", "decode")
CUDA = {"device": "cuda"}


class Actor(Child):
    """No process: it runs from its start on, serves when it is told to, and can end."""

    runs = False
    serves = False
    ended = False

    def start(self, log: TextIO) -> None:
        self.runs, self.ended, self.serves, self.ready = True, False, False, False
        self.started = time.monotonic()

    def end(self) -> None:
        self.runs, self.ended = False, True

    @property
    def is_running(self) -> bool:
        return self.runs

    @property
    def exit_code(self) -> int | None:
        return 1 if self.ended else None

    def check_ready(self) -> bool:
        self.ready = self.serves and self.runs
        return self.ready


class Stack(Supervisor):
    """A supervisor of actors on GPUs of the test's choice."""

    def __init__(
        self, roles: Sequence[str], gpus: Sequence[str], told: Mapping[str, Mapping[str, object]]
    ) -> None:
        super().__init__(UpConfig(model="m"))
        self.children = [Actor(f"{role}-{at}", [role], "") for at, role in enumerate(roles)]
        given = {role: {**CUDA, **told.get(role, {})} for role in ROLES}
        self._turns = Turns(sharers(self.children, gpus, given), patience=300.0)
        self._due = list(self.children)

    def step(self, *serving: int) -> list[str]:
        for number in serving:
            child = self.children[number]
            assert isinstance(child, Actor)
            child.serves = True
        return [child.name for child in self._start_due()]

    def end(self, *numbers: int) -> None:
        """Those with the numbers have ended, and are to be started again."""
        for number in numbers:
            child = self.children[number]
            assert isinstance(child, Actor)
            child.end()
            self._due.append(child)

    def shares(self) -> list[str | None]:
        """Of each child, as the stack told it: by a flag, or by its environment."""
        return [
            dict(pairwise(child.arguments)).get("--gpu-memory-utilization")
            or child.environment.get(ENV_SHARE)
            for child in self.children
        ]
