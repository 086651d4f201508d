"""A node's agent in a world: what it copies into D's landing slots, and how it gets into blocks.

The running bookkeeping (``Landing``) says which slot is whose. An agent may end at any time; what
it has begun may land as long afterwards as one likes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.kvtransfer.model.parts import JUNK, KEYS, NOW, Broken, InFlight, Setup

from tandem.kvtransfer.transports.agent.landing import Landing, Piece
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation

if TYPE_CHECKING:
    from tests.kvtransfer.model.world import World

MOST_PARTS = 16


class Take(NamedTuple):
    """A copy that has landed and been answered, on its way into D's blocks."""

    read: InFlight
    generation: int
    tags: tuple[bytes, ...]
    lost: object = None
    """What lay in its slot when the slots became another generation's; it lies there still."""
    failed: bool = False
    """Nobody wants it any more, but it is being written."""


class AgentSide(NamedTuple):
    """D's end of the agent, and its slots."""

    landing: Landing
    pending: tuple[InFlight, ...] = ()
    """Copies that wait for a landing slot."""
    takes: tuple[Take, ...] = ()
    ring: tuple[object, ...] = ()
    """What lies in the landing slots."""

    @classmethod
    def new(cls, setup: Setup) -> AgentSide:
        count = setup.receive_slots
        return cls(setup.landing(count, count), ring=(JUNK,) * count)

    def copied(self) -> AgentSide:
        return self._replace(landing=self.landing.copy())

    def sign(self) -> tuple[object, ...]:
        """A hashable value, equal for ends that behave alike."""
        now = self.landing.generation
        takes = tuple(each._replace(generation=each.generation - now) for each in self.takes)
        return (self.landing.snapshot(), self.pending, takes, self.ring)


def ask(world: World, read: InFlight) -> None:
    """D wants a copy: it is asked for when there is a slot."""
    world.own_agent()
    world.agent = world.agent._replace(pending=(*world.agent.pending, read))
    world.agent.landing.add([Piece(read.peer, _ticket(read), 0)])
    _grant(world)


def land(world: World, n: int) -> None:
    """The bytes of a copy arrive in its slot, or its end is answered."""
    read = world.reads[n]
    assert read.landing is not None
    if read.landed:
        _answer(world, n)
        return
    (theirs,) = read.remote_blocks
    if not read.ghost or not world.setup.new_slots:
        ring = world.agent.ring
        after = (*ring[: read.landing], world.p_blocks[theirs], *ring[read.landing + 1 :])
        world.agent, world.agent_sign = world.agent._replace(ring=after), None
    if read.ghost:
        _drop(world, n)
    else:
        _put(world, n, read._replace(landed=True))


def _answer(world: World, n: int) -> None:
    from tests.kvtransfer.model.arrivals import tags_behind

    read = world.reads[n]
    assert read.landing is not None
    _drop(world, n)
    seen = tags_behind(world, read)
    world.own_agent()
    piece = world.agent.landing.answered(read.landing)
    if piece is not None:
        if piece.ticket != _ticket(read):  # D takes it for the answer to what it asked there last
            named = [_ticket(each) for each in world.reads]
            read = world.reads[named.index(piece.ticket)]
            _put(world, named.index(piece.ticket), read._replace(ghost=True))
        take = Take(read, world.agent.landing.generation, seen)
        world.agent = world.agent._replace(takes=(*world.agent.takes, take))
    _grant(world)


def take(world: World, n: int) -> None:
    """D copies what landed into its block, and hears that it is over."""
    each = world.agent.takes[n]
    read, slot = each.read, each.read.landing
    assert slot is not None
    use = world.use[KEYS.index(read.key)]
    if use.ended and use.blocks_free:
        raise Broken(f"{read} writes blocks that are free")
    world.own_agent()
    agent = world.agent
    world.agent = agent._replace(takes=agent.takes[:n] + agent.takes[n + 1 :])
    here = each.generation == agent.landing.generation
    (mine,) = read.block_ids
    what = agent.ring[slot] if here else each.lost
    world.d_blocks = (*world.d_blocks[:mine], what, *world.d_blocks[mine + 1 :])
    agent.landing.over(slot, each.generation)
    _grant(world)
    if each.failed:
        _fail(world, read)
        return
    before = len(world.unpacks)
    world.d_does(world.at_d("copy_ended", read.key, read.part, NOW))
    if len(world.unpacks) > before:
        world.seen = (*world.seen, (read.key, read.part, each.tags))


def refuse(world: World, n: int) -> None:
    """The agent does not copy, or cannot."""
    read = world.reads[n]
    assert read.landing is not None
    _drop(world, n)
    world.own_agent()
    piece = world.agent.landing.answered(read.landing)
    if piece is not None:
        world.agent.landing.over(read.landing, world.agent.landing.generation)
        _fail(world, read)
    _grant(world)


def give_up(world: World, peer: Incarnation) -> None:
    """D's link to the peer is lost: its reads have failed, as far as D does not write blocks."""
    world.own_agent()
    agent = world.agent
    asked = set(agent.landing._asked.values())
    gone = [each for each in agent.pending if each.peer == peer]
    gone += [
        each
        for each in world.reads
        if each.peer == peer and not each.ghost and Piece(peer, _ticket(each), 0) in asked
    ]
    for each in gone:
        agent.landing.give_up(_ticket(each))
    pending = tuple(each for each in agent.pending if each.peer != peer)
    takes = tuple(
        each._replace(failed=True) if each.read.peer == peer else each for each in agent.takes
    )
    world.agent = agent._replace(pending=pending, takes=takes)
    for each in gone:
        _fail(world, each)
    _grant(world)


def ends(world: World) -> None:
    """The agent is gone, and another is there at once, with slots that nothing old reaches."""
    world.own_agent()
    agent = world.agent
    lost = agent.landing.agent_lost()
    gone = [each for each in agent.pending if _ticket(each) in lost]
    gone += [each for each in world.reads if not each.ghost and _ticket(each) in lost]
    takes = tuple(
        each if each.lost is not None else each._replace(lost=agent.ring[each.read.landing or 0])
        for each in agent.takes
    )
    ring = (JUNK,) * len(agent.ring) if world.setup.new_slots else agent.ring
    world.agent = agent._replace(pending=(), takes=takes, ring=ring)
    world.reads = tuple(each._replace(ghost=True) for each in world.reads if not each.landed)
    for each in gone:
        _fail(world, each)


def _grant(world: World) -> None:
    while (granted := world.agent.landing.grant()) is not None:
        slot, piece = granted
        agent = world.agent
        (read,) = [each for each in agent.pending if _ticket(each) == piece.ticket]
        left = tuple(each for each in agent.pending if each is not read)
        world.agent = agent._replace(pending=left)
        hasty = world.tags_of(read.remote_blocks) if world.setup.hasty_tags else None
        read = read._replace(landing=slot, stale=False, seen=hasty)
        world.reads = (*world.reads, read)


def _fail(world: World, read: InFlight) -> None:
    ended = world.at_d("copy_ended", read.key, read.part, NOW, FailCause.PEER, "failed")
    world.d_does(ended)


def _ticket(read: InFlight) -> int:
    return KEYS.index(read.key) * MOST_PARTS + read.part


def _drop(world: World, n: int) -> None:
    world.reads = world.reads[:n] + world.reads[n + 1 :]


def _put(world: World, n: int, read: InFlight) -> None:
    world.reads = (*world.reads[:n], read, *world.reads[n + 1 :])
