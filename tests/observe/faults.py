"""Faults of processes, and the alerts that each has to fire."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stack import Stack

SETTINGS = {"handoffFailuresPerSecond": 0.01, "slowHandoffShare": 0.02}
"""Of the chart's rules, for a fault that strikes a few times a minute; all else is as it comes."""
STOPPED, SHORTLY, BETWEEN = 7.0, 3.0, 6.0
"""Seconds: longer than a peer's silence is borne (four seconds), shorter, and between."""
FULL_LIMITS = Path(__file__).with_name("full_limits.yaml")
SMALL = ["--num-gpu-blocks-override", "64", "--block-size", "16"]

Strike = Callable[["Stack", threading.Event], None]


def lose_decode(stack: Stack, _: threading.Event) -> None:
    stack.killed = frozenset({"decode-0"})
    stack.signal("decode-0", signal.SIGKILL)


def stop_prefill(stack: Stack, over: threading.Event) -> None:
    """The prefill worker stands still for seconds, again and again."""
    while not over.is_set():
        for seconds in (STOPPED, SHORTLY):
            stack.signal("prefill-0", signal.SIGSTOP)
            over.wait(seconds)
            stack.signal("prefill-0", signal.SIGCONT)
            over.wait(BETWEEN)


def nothing(_: Stack, __: threading.Event) -> None:
    """The fault is how the service was started."""


@dataclass(frozen=True)
class Scene:
    """A service of its own with one fault, under load."""

    name: str
    fault: str
    """In words, for the page."""
    fires: tuple[str, ...]
    strike: Strike = nothing
    clients: int = 2
    max_tokens: int = 48
    worker_flags: list[str] = field(default_factory=list)
    router_flags: list[str] = field(default_factory=list)
    at_once: tuple[str, ...] = ()
    """Alerts whose fault is there from the start, before anything is struck."""
    broken: str = ""
    """A package that cannot be imported by its processes."""


SCENES = (
    Scene(
        "lost",
        "the only decode worker is killed and not restarted",
        (
            *("TandemNoWorkers", "TandemAnswerBudgetFast", "TandemTargetDown"),
            "TandemNoFirstToken",
        ),
        strike=lose_decode,
    ),
    Scene(
        "full",
        "24 clients load a small pair: KV of 1,024 tokens, 12 requests running, 8 queued",
        (
            *("TandemQueueOld", "TandemRequestsRejected", "TandemKVFullPreempting"),
            "TandemFirstTokenBudgetFast",
        ),
        clients=24,
        max_tokens=160,
        worker_flags=SMALL,
        router_flags=["--limits-file", str(FULL_LIMITS)],
    ),
    Scene(
        "stopped",
        "the prefill worker is paused (SIGSTOP) for 7 s, then 3 s, repeatedly; NIXL cannot load",
        ("TandemTransportFellBack", "TandemHandoffFailures", "TandemHandoffsSlow"),
        strike=stop_prefill,
        clients=4,
        at_once=("TandemTransportFellBack",),
        broken="nixl",
    ),
    Scene(
        "agentless",
        "KV requires the node agent, which does not run",
        ("TandemLinksFell",),
        worker_flags=["--kv-node-folder", gettempdir(), "--kv-node-copy", "agent"],
        at_once=("TandemLinksFell",),
    ),
)


def fired() -> set[str]:
    """Alerts that a fault of processes has to fire."""
    return {alert for scene in SCENES for alert in scene.fires}


def broken_package(folder: Path, name: str) -> Path:
    """A folder for PYTHONPATH in which a package cannot be imported."""
    place = folder / "broken"
    (place / name).mkdir(parents=True, exist_ok=True)
    message = f"cannot load {name}: made so by a test"
    (place / name / "__init__.py").write_text(f"raise ImportError({message!r})\n")
    return place
