"""Every choice that can be made in a world: each yields a name and the world that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.kvtransfer.model import agent
from tests.kvtransfer.model.arrivals import d_takes, land, read_fails, unpack
from tests.kvtransfer.model.blocks import (
    Home,
    content,
    copied,
    form_of,
    home,
    in_blocks,
    left,
    place_in,
    tables,
)
from tests.kvtransfer.model.lending import ASKED, lending_moves
from tests.kvtransfer.model.limits import finish_at_p
from tests.kvtransfer.model.parts import JUNK, KEYS, NOW, P_ADDRESS, TOKEN, Broken
from tests.kvtransfer.model.world import World, replaced

from tandem.kvtransfer.handoff import export as p_events
from tandem.kvtransfer.handoff import pull as d_events
from tandem.kvtransfer.handoff.lease import ENDED
from tandem.kvtransfer.handoff.pull import SlotState
from tandem.kvtransfer.handoff.tables import DState
from tandem.kvtransfer.memory.blocks import CLEARED
from tandem.protocol.card import KVKind

Move = tuple[str, Callable[[World], None]]
Fault = tuple[str, str, Callable[[World], None]]
"""Kind, name, act."""

ALL_FAULTS = (
    "p restarts",
    "d restarts",
    "frame lost",
    "frame repeated",
    "p counts d as lost",
    "d counts p as lost",
    "p refuses",
    "p cancels",
    "router cancels",
    "p's engine gives up",
    "d cancels",
    "p's deadline",
    "d's deadline",
    "p forgets",
    "d forgets",
    "read fails",
    "p overwrites",
    "agent ends",
)


def moves(world: World) -> Iterator[Move]:
    """What may happen now, faults included while the budget lasts."""
    yield from fair_moves(world)
    if world.faults_left:
        allowed = world.setup.faults
        for kind, name, act in _faults(world):
            if kind in allowed:
                yield name, _counted(act)


def _counted(act: Callable[[World], None]) -> Callable[[World], None]:
    def run(world: World) -> None:
        world.faults_left -= 1
        act(world)

    return run


def fair_moves(world: World) -> Iterator[Move]:
    """What goes on by itself: frames, engines, packs, reads, unpacks."""
    if world.to_d:
        yield "d reads a frame", World.deliver_to_d
    if world.to_p:
        yield "p reads a frame", World.deliver_to_p
    for n in range(len(world.packs)):
        yield f"pack {n}", partial(_pack, n=n)
    for n in range(len(world.unpacks)):
        yield f"unpack {n}", partial(unpack, n=n)
    for n, read in enumerate(world.reads):
        yield f"{'end' if read.landed else 'land'} {n}", partial(land, n=n)
        if read.peer != world.p and not read.ghost:
            yield f"dead read {n}", partial(read_fails, n=n)
    for n in range(len(world.agent.takes)):
        yield f"take {n}", partial(agent.take, n=n)
    for index in range(world.setup.num_keys):
        yield from _engine_moves(world, index)


def _engine_moves(world: World, index: int) -> Iterator[Move]:
    use = world.use[index]
    if world.setup.lends:
        yield from lending_moves(world, index)
    else:
        yield from _producing_moves(world, index)
    if not use.opened:
        yield f"open {index}", lambda w: _open(w, index)
    elif use.ready and not use.loading and not use.ended:
        yield f"load {index}", lambda w: _load(w, index)


def _producing_moves(world: World, index: int) -> Iterator[Move]:
    work = world.work[index]
    if work.fenced < work.step - 1 and not (work.released and not work.fenced):
        yield f"fence {index}", lambda w: _fence(w, index)
    if world.setup.brisk:
        if not work.done and _has_room(world, index):
            yield f"compute {index}", lambda w: _compute(w, index)
    elif work.step == 0:
        if _has_room(world, index):
            yield f"admit {index}", lambda w: _admit(w, index)
    elif not work.done:
        if work.step <= world.setup.num_blocks:
            yield f"launch {index}", lambda w: _launch(w, index)
        elif not work.first:
            yield f"first token {index}", lambda w: _first(w, index)
        else:
            yield f"finished {index}", lambda w: _finish(w, index, cancelled=False)


def _has_room(world: World, index: int) -> bool:
    """Whether P's engine has blocks for the key: those of another are its own only then."""
    others = range(world.setup.num_keys)
    return world.setup.home is not Home.REUSED or not any(world.holds(index, n) for n in others)


def _faults(world: World) -> Iterator[Fault]:
    if world.p_born + 1 < len(P_ADDRESS):
        yield "p restarts", "p restarts", _p_restarts
        yield "d restarts", "d restarts", _d_restarts
    for name in ("to_p", "to_d"):
        if getattr(world, name):
            yield "frame lost", f"{name} lost", partial(_lose, name=name)
            yield "frame repeated", f"{name} repeated", partial(_repeat, name=name)
    if world.p_session is not None:
        yield "p counts d as lost", "p counts d as lost", World.p_loses_link
    if world.d_session is not None:
        yield "d counts p as lost", "d counts p as lost", World.d_loses_link
    if world.setup.agent and (world.reads or world.agent.takes):
        yield "agent ends", "the agent ends", agent.ends
    for n, read in enumerate(world.reads):
        if read.peer == world.p and not read.ghost:
            yield "read fails", f"read fails {n}", partial(read_fails, n=n)
    for index in range(world.setup.num_keys):
        yield from _key_faults(world, index)


def _key_faults(world: World, index: int) -> Iterator[Fault]:
    key, work, use = KEYS[index], world.work[index], world.use[index]
    yield "p cancels", f"p cancels {index}", lambda w: _p_cancels(w, index)
    yield "router cancels", f"router cancels {index}", lambda w: _router_cancels(w, index)
    if work.step == 0:
        yield "p refuses", f"p refuses {index}", lambda w: _refuse(w, index)
    if world.setup.direct and work.fenced and not work.released:
        name = f"p overwrites a leased block of {index}"
        yield "p overwrites", name, lambda w: _p_overwrites(w, index)
    if work.step and not work.done:
        name = f"p's engine gives up {index}"
        yield "p's engine gives up", name, lambda w: _finish(w, index, cancelled=True)
    if use.opened:
        yield "d cancels", f"d cancels {index}", lambda w: _d_cancels(w, index)
    export, pull = world.exports.exports.get(key), world.imports.pulls.get(key)
    if export is not None:
        kind = "p forgets" if export.state in ENDED else "p's deadline"
        yield kind, f"{kind} {index}", lambda w: p_deadline(w, index)
    if pull is not None:
        kind = "d forgets" if pull.state is DState.CLOSED else "d's deadline"
        yield kind, f"{kind} {index}", lambda w: d_deadline(w, index)


# -- P ------------------------------------------------------------------------------------------


def _p(world: World, event: p_events.Event) -> None:
    world.p_does(world.at_p("apply", event, NOW))


def _work(world: World, index: int, **changes: Any) -> None:
    world.work = replaced(world.work, index, world.work[index]._replace(**changes))


def _admit(world: World, index: int) -> None:
    _work(world, index, step=1)
    up = world.d in world.exports.links
    direct = world.setup.direct
    _p(world, p_events.Admit(KEYS[index], world.d, world.setup.num_blocks, 40, up, direct))


def _refuse(world: World, index: int) -> None:
    """The request is turned down; its engine has nothing to let go of."""
    _work(world, index, step=world.setup.num_blocks + 1, first=True, done=True, released=True)
    _p(world, p_events.Refuse(KEYS[index]))


def _launch(world: World, index: int) -> None:
    step = world.work[index].step
    _work(world, index, step=step + 1)
    setup = world.setup
    tables_of_p = in_blocks(setup, home(setup, index), step - 1, setup.p_block)
    if setup.home is not Home.SHARED:  # what left a window is another's from now on
        for at in left(setup, index, step - 1):
            world.p_blocks = replaced(world.p_blocks, at, JUNK)
    _p(world, p_events.Launched(KEYS[index], tables_of_p, step))


def _fence(world: World, index: int) -> None:
    fenced = world.work[index].fenced
    last = fenced == world.setup.num_blocks - 1
    for kind, table in zip(world.setup.kinds, home(world.setup, index), strict=True):
        block = written = table[fenced]
        if kind is KVKind.STATE:  # each chunk overwrites it
            block = table[0]
            written = block if last else -1
        if not world.work[index].released:
            what = content(world.setup, index, written, world.p)
            world.p_blocks = replaced(world.p_blocks, block, what)
    _work(world, index, fenced=fenced + 1)
    _p(world, p_events.Fenced(KEYS[index], fenced + 1))


def _first(world: World, index: int) -> None:
    _work(world, index, first=True)
    _p(world, p_events.First(KEYS[index], TOKEN, finish_at_p(world.setup)))


def _finish(world: World, index: int, *, cancelled: bool) -> None:
    _work(world, index, done=True)
    _p(world, p_events.Finished(KEYS[index], cancelled))


def _compute(world: World, index: int) -> None:
    """P's engine from admission to letting go, in one go (fewer states, for wider worlds)."""
    _admit(world, index)
    for _ in range(world.setup.num_blocks):
        _launch(world, index)
        _fence(world, index)
    _first(world, index)
    _finish(world, index, cancelled=False)


def _p_overwrites(world: World, index: int) -> None:
    """A fault of P's engine: a block is written again though it is promised. Whoever writes a block
    clears its tag first."""
    block = home(world.setup, index)[0][0]
    tags = copied(world.p_tags)
    tags._write(block // world.setup.p_block, CLEARED)
    world.retag(tags)
    world.p_blocks = replaced(world.p_blocks, block, JUNK)


def _p_cancels(world: World, index: int) -> None:
    _p(world, p_events.Cancel(KEYS[index]))


def _router_cancels(world: World, index: int) -> None:
    """CANCEL comes to P's engine, or P's router is lost: nobody waits for a deadline then."""
    work = world.work[index]
    here = bool(work.step) and not work.done
    if not (work.done and world.setup.deaf):
        _p_cancels(world, index)
    if here:
        _finish(world, index, cancelled=False)
    work, export = world.work[index], world.exports.exports.get(KEYS[index])
    if (export is not None and export.state not in ENDED) or work.done != work.released:
        raise Broken(f"the lease of key {index} outlives its cancel")


def p_deadline(world: World, index: int) -> None:
    _p(world, p_events.Timeout(KEYS[index]))


def _pack(world: World, n: int) -> None:
    pack = world.packs[n]
    world.packs = world.packs[:n] + world.packs[n + 1 :]
    if world.exports.ring[pack.slot].state is SlotState.FREE:
        raise Broken(f"{pack} writes a slot that is free")
    kind, start = world.setup.kinds[pack.group], pack.start
    at = place_in(kind, pack.block_ids, start, start, world.setup.p_block)
    world.p_slots = replaced(world.p_slots, pack.slot, world.p_blocks[at])
    _p(world, p_events.Packed(pack.key, pack.index, ok=True))


def _p_restarts(world: World) -> None:
    world.p_born += 1
    world.new_producer()
    world.p_stale = False


# -- D ------------------------------------------------------------------------------------------


def _use(world: World, index: int, **changes: Any) -> None:
    world.use = replaced(world.use, index, world.use[index]._replace(**changes))


def _open(world: World, index: int) -> None:
    peer = next(iter(world.imports.links), world.p)
    _use(world, index, opened=True, producer=peer)
    up = peer in world.imports.links
    form = form_of(world.setup, world.imports.policy.groups)
    hashes = ASKED if world.setup.lends else ()
    d_takes(world, d_events.Opened(KEYS[index], peer, 40, up, world.setup.direct, form, hashes))


def _load(world: World, index: int) -> None:
    _use(world, index, loading=True, blocks_free=False)
    setup = world.setup
    mine = in_blocks(setup, tables(setup, index), setup.num_blocks, setup.d_block)
    d_takes(world, d_events.Load(KEYS[index], mine, setup.hit, setup.num_blocks))


def _d_cancels(world: World, index: int) -> None:
    d_takes(world, d_events.Cancel(KEYS[index]))


def d_deadline(world: World, index: int) -> None:
    d_takes(world, d_events.Timeout(KEYS[index]))


def _d_restarts(world: World) -> None:
    world.d_born += 1
    world.new_consumer()
    world.connect()


# -- network ------------------------------------------------------------------------------------


def _lose(world: World, name: str) -> None:
    setattr(world, name, getattr(world, name)[1:])


def _repeat(world: World, name: str) -> None:
    queue = getattr(world, name)
    setattr(world, name, (queue[0], *queue))
