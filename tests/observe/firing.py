"""`make alerts`: each fault is made, and a real Prometheus is asked until its alerts fire."""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.rules import chart
from tests.observe import faults, operator_faults, operators, table
from tests.observe.prometheus import Prometheus, Target
from tests.screens.load import loaded
from tests.waiting import wait_for

from tandem.hub import DEFAULT_MODEL, prepare

if TYPE_CHECKING:
    from stack import Stack

OUT = Path("docs/alerts-fired.md")
LOOK_EVERY, UP_SECONDS, CALM_SECONDS = 1.0, 120.0, 20.0

Fired = dict[tuple[str, str], float | None]
"""Seconds by alert and fault; None for one that did not fire."""


def main() -> int:
    """Write the table; 1 where an alert that a fault has to fire did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.observe.firing", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="page to write")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long alerts may take (20)")
    parser.add_argument(
        "--operator", action="store_true", help="faults of operators beside a real API server"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="ALERT",
        help="this alert alone, with the services that its fault needs; may be given more than "
        "once. Rows of others stay as they are",
    )
    options = parser.parse_args()
    known = operator_faults.fired() if options.operator else faults.fired()
    only = frozenset(options.only or known)
    if unknown := sorted(only - known):
        parser.error(f"--only: {', '.join(unknown)}: none of {', '.join(sorted(known))}")
    patience = 60.0 * options.minutes
    with tempfile.TemporaryDirectory() as name, ExitStack() as open_:
        if options.operator:
            found = operators.watch(Path(name), only, patience, open_)
        else:
            sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))  # the stack
            model = str(prepare(DEFAULT_MODEL, progress=False).path)
            found = watch(Path(name), model, only, patience, open_)
    write(options.out, found, datetime.now(UTC).date().isoformat())
    for key, seconds in found.items():
        print(*key, seconds)
    return int(any(seconds is None for seconds in found.values()))


def write(out: Path, found: Fired, day: str) -> None:
    """The page, with these rows anew and all others as they were."""
    rows = table.read(out)
    settings = {**faults.SETTINGS, **operator_faults.SETTINGS}
    groups = chart.rule_file(settings, operator_faults.WAITS)["groups"]
    waits = {rule.get("alert"): rule.get("for", "0") for each in groups for rule in each["rules"]}
    for (alert, fault), seconds in found.items():
        took = table.NEVER if seconds is None else f"{seconds:.0f}"
        rows[alert] = table.Row(alert, fault, waits[alert], took, day)
    out.write_text(table.page(rows.values(), settings, operator_faults.WAITS))


def watch(
    folder: Path, model: str, only: Collection[str], seconds: float, open_: ExitStack
) -> Fired:
    """Raise the services that those alerts need, strike, and look until all have fired or time is
    over."""
    targets: list[Target] = []
    scenes = [scene for scene in faults.SCENES if set(only) & set(scene.fires)]
    stacks = {scene.name: raise_scene(scene, folder, model, open_) for scene in scenes}
    for name, stack in stacks.items():
        targets.append(Target(f"{name}-router-0", "router", stack.port, name))
        for worker, port in stack.probes.items():
            role = worker.partition("-")[0]
            targets.append(Target(f"{name}-{worker}", role, port, name))
    since_start = time.monotonic()
    prometheus = open_.enter_context(Prometheus.running(folder, targets, faults.SETTINGS))
    for scene in scenes:
        load = loaded(stacks[scene.name].url, clients=scene.clients, max_tokens=scene.max_tokens)
        open_.enter_context(load)
    wait_for(lambda: prometheus.targets_up() == len(targets), UP_SECONDS)
    time.sleep(CALM_SECONDS)
    over = threading.Event()
    open_.callback(over.set)
    struck = time.monotonic()
    for scene in scenes:
        hand = threading.Thread(target=scene.strike, args=(stacks[scene.name], over), daemon=True)
        hand.start()
        open_.callback(hand.join, 2 * (faults.STOPPED + faults.BETWEEN))
        open_.callback(over.set)
    begun = {
        (scene.name, alert): since_start if is_at_once(scene, alert) else struck
        for scene in scenes
        for alert in scene.fires
        if alert in only
    }
    seen: dict[tuple[str, str], float] = {}
    while len(seen) < len(begun) and time.monotonic() < struck + seconds:
        look(prometheus, begun, seen)
        time.sleep(LOOK_EVERY)
    told = {scene.name: scene.fault for scene in scenes}
    return {(alert, told[name]): seen.get((name, alert)) for name, alert in begun}


def look(
    prometheus: Prometheus,
    begun: Mapping[tuple[str, str], float],
    seen: MutableMapping[tuple[str, str], float],
) -> None:
    """Note which of the alerts (by service and name) fire now that did not before, and how long
    after their faults had ``begun``."""
    for key in prometheus.firing() & set(begun) - set(seen):
        seen[key] = time.monotonic() - begun[key]
        print(f"{seen[key]:7.1f} s: {key[1]} of {key[0] or 'the operator'}", flush=True)


def is_at_once(scene: faults.Scene, alert: str) -> bool:
    """Whether the fault of an alert is there from the start."""
    return alert in scene.at_once or scene.strike is faults.nothing


def raise_scene(scene: faults.Scene, folder: Path, model: str, open_: ExitStack) -> Stack:
    from stack import Stack, stop_all

    log = open_.enter_context((folder / f"{scene.name}.log").open("w"))
    flags = ["--max-num-batched-tokens", "128", *scene.worker_flags]
    stack = Stack(model, log, worker_flags=flags, router_flags=scene.router_flags)
    open_.callback(stop_all, stack.children, 10.0)
    for child in stack.children:
        if scene.broken:
            child.environment["PYTHONPATH"] = str(faults.broken_package(folder, scene.broken))
        child.start(log)
    stack.wait_ready()
    return stack


if __name__ == "__main__":
    sys.exit(main())
