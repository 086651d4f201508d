"""Breadth-first walk through every world that can be reached, up to a budget of faults.

Safety is checked by the worlds themselves (``Broken``). Liveness: from every state, with no more
faults and fair timers, both ends come to rest with nothing held.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.kvtransfer.model.moves import d_deadline, fair_moves, moves, p_deadline
from tests.kvtransfer.model.parts import KEYS, Broken, Setup
from tests.kvtransfer.model.world import World

from tandem.kvtransfer.handoff.pull import SlotRing
from tandem.kvtransfer.handoff.tables import DState

MAX_CALM_STEPS = 400


class Found(NamedTuple):
    states: int
    transitions: int
    complete: bool
    """False: the limit on states ended the walk."""


class Counterexample(AssertionError):
    def __init__(self, message: str, path: list[str]) -> None:
        super().__init__(message + "\n  " + "\n  ".join(path))
        self.path = path


def explore(setup: Setup, *, faults: int, max_states: int, liveness: bool = True) -> Found:
    """Walk; raise Counterexample with the shortest path to the first broken promise."""
    gc.collect()
    gc.disable()  # millions of small live values, no cycles: the collector would only look
    try:
        return _walk(setup, faults, max_states, liveness)
    finally:
        gc.enable()


def _walk(setup: Setup, faults: int, max_states: int, liveness: bool) -> Found:
    start = World(setup)
    start.faults_left = faults
    bare = hash(start.sign())
    signs = {hash((bare, faults))}  # 64 bits each: two of a million states collide with 3e-8
    parents: list[tuple[int, str]] = [(0, "start")]
    calm: set[int] = set()
    queue = deque([(0, start, bare)])
    transitions = 0
    while queue:
        number, world, bare = queue.popleft()
        goes_on: int | None = None
        for name, act in moves(world):
            after = world.copy()
            transitions += 1
            try:
                act(after)
            except AssertionError as error:
                raise Counterexample(str(error), [*_path(parents, number), name]) from error
            then = hash(after.sign())
            if goes_on is None and after.faults_left == world.faults_left and _is_calm(name):
                goes_on = then
            sign = hash((then, after.faults_left))
            if sign in signs:
                continue
            if len(signs) >= max_states:
                return Found(len(signs), transitions, complete=False)
            signs.add(sign)
            parents.append((number, name))
            queue.append((len(parents) - 1, after, then))
        if liveness and goes_on in calm:
            calm.add(bare)
        elif liveness:
            _must_come_to_rest(world, calm, partial(_path, parents, number))
    return Found(len(signs), transitions, complete=True)


def _path(parents: list[tuple[int, str]], number: int) -> list[str]:
    names = []
    while number:
        number, name = parents[number]
        names.append(name)
    return names[::-1]


def _must_come_to_rest(world: World, calm: set[int], path: Callable[[], list[str]]) -> None:
    """Go on without faults until everything is free, or a state is met that is known to do so."""
    world = world.copy()
    seen = []
    names: list[str] = []
    for _ in range(MAX_CALM_STEPS):
        sign = hash(world.sign())
        if sign in calm:
            break
        seen.append(sign)
        try:
            name = _calm_step(world)
        except AssertionError as error:
            raise Counterexample(str(error), [*path(), "-- calm --", *names]) from error
        if name is None:
            _must_be_free(world, [*path(), "-- calm --", *names])
            break
        names.append(name)
    else:
        raise Counterexample("no rest", [*path(), "-- calm --", *names[:60]])
    calm.update(seen)


def _calm_step(world: World) -> str | None:
    """One step of a calm world: what goes on by itself first, then links, then deadlines."""
    for name, act in fair_moves(world):
        if _is_calm(name):
            act(world)
            return name
    if _link_is_sick(world):
        world.p_loses_link()
        world.d_loses_link()
        return "links are lost and made again"
    for index, key in enumerate(KEYS[: world.setup.num_keys]):
        pull = world.imports.pulls.get(key)
        if pull is not None and pull.state is not DState.FAILING:
            d_deadline(world, index)
            return f"d's deadline {index}"
        if key in world.exports.exports:
            work = world.work[index]
            if work.step and not work.done:
                return None
            p_deadline(world, index)
            return f"p's deadline {index}"
    return None


def _is_calm(name: str) -> bool:
    return not name.startswith(("open", "admit"))


def _rings(world: World) -> tuple[tuple[str, SlotRing], ...]:
    return (
        ("send", world.exports.ring),
        ("receive", world.imports.ring),
        ("landing", world.agent.landing.ring),
    )


def _link_is_sick(world: World) -> bool:
    """What a beat would show: an end without a session, or numbers that do not fit."""
    p, d = world.p_session, world.d_session
    if p is None or d is None or world.p_stale:
        return True
    ends = (p.peer, d.peer, p._sent, d._sent)
    return ends != (world.d, world.p, d._expected, p._expected)


def _must_be_free(world: World, path: list[str]) -> None:
    for name, held in (
        ("exports", world.exports.exports),
        ("pulls", world.imports.pulls),
        ("reads", world.reads),
        ("copies that wait for a slot", world.agent.pending),
        ("copies that landed", world.agent.takes),
        ("packs", world.packs),
        ("unpacks", world.unpacks),
        ("tags of copies", world.seen),
        ("P's tags", world.p_tags._by_key or any(world.p_tags._bytes[: world.p_tags._turns_at])),
    ):
        if held:
            raise Counterexample(f"{name} are left: {held}", path)
    for name, ring in _rings(world):
        if ring.free != len(ring):
            raise Counterexample(f"{name} slots are left", path)
    for work, use in zip(world.work, world.use, strict=True):
        if work.done != work.released:
            raise Counterexample("P's blocks were not released", path)
        if use.opened and not (use.ended and use.blocks_free):
            raise Counterexample("D's key has no ending, or keeps its blocks", path)


__all__ = ["Broken", "Counterexample", "Found", "explore"]
