"""What comes to D in a world, and how it is checked: reads, copies, unpacks."""

from __future__ import annotations

from tests.kvtransfer.model import agent
from tests.kvtransfer.model.blocks import content, hashes, home, place_in, place_of, tag
from tests.kvtransfer.model.parts import BLOCK, KEYS, NOW, Broken, InFlight, Use
from tests.kvtransfer.model.world import World, replaced

from tandem.kvtransfer.handoff import pull as d_events
from tandem.kvtransfer.handoff.actions import Unpack
from tandem.kvtransfer.handoff.lease import ENDED
from tandem.kvtransfer.handoff.tables import DState
from tandem.kvtransfer.memory.blocks import CLEARED
from tandem.kvtransfer.mover.make_slots import fault_of_copy
from tandem.protocol.card import KVKind
from tandem.protocol.errors import FailCause


def d_takes(world: World, event: d_events.Event) -> None:
    world.d_does(world.at_d("apply", event, NOW))


def land(world: World, n: int) -> None:
    """The bytes of a read arrive, whatever lies in the slot at that address by now."""
    read = world.reads[n]
    if read.landing is not None:
        agent.land(world, n)
        return
    if read.slot is None or read.remote_slot is None:
        if read.landed:
            _copy_ends(world, n)
        else:
            _copy_lands(world, n)
        return
    world.reads = world.reads[:n] + world.reads[n + 1 :]
    world.d_slots = replaced(world.d_slots, read.slot, world.p_slots[read.remote_slot])
    if not world.setup.strict_slots and world.imports.ring[read.slot].key != read.key:
        return  # its handle was let go of: the bytes land, and nobody is told
    _owned_or_quarantined(world, read.slot, read.key)
    world.d_does(world.at_d("read_ended", read.slot, NOW))


def _copy_lands(world: World, n: int) -> None:
    """Bytes of P's blocks, whatever they hold by now, arrive in D's."""
    read = world.reads[n]
    use = world.use[KEYS.index(read.key)]
    if use.ended and use.blocks_free:
        raise Broken(f"{read} writes blocks that are free")
    setup = world.setup
    for token in range(read.start, read.stop):
        kind = setup.kinds[read.group]
        mine = place_in(kind, read.block_ids, read.start, token, setup.d_block)
        theirs = place_in(kind, read.remote_blocks, read.start, token, setup.p_block)
        world.d_blocks = replaced(world.d_blocks, mine, world.p_blocks[theirs])
    world.reads = replaced(world.reads, n, read._replace(landed=True))


def _copy_ends(world: World, n: int) -> None:
    """The tags are read, whatever they are by now, and the copy is terminal."""
    read = world.reads[n]
    world.reads = world.reads[:n] + world.reads[n + 1 :]
    seen = tags_behind(world, read)
    before = len(world.unpacks)
    world.d_does(world.at_d("copy_ended", read.key, read.part, NOW))
    if len(world.unpacks) > before:
        world.seen = (*world.seen, (read.key, read.part, seen))


def tags_behind(world: World, read: InFlight) -> tuple[bytes, ...]:
    """What is read of the tags behind a copy, as they are now."""
    seen = read.seen
    if seen is None:
        seen = world.tags_of(read.remote_blocks)
        if read.stale and world.setup.turns:
            seen = (CLEARED,) * len(seen)
        _must_have_tags(world, read, seen)
    return seen


def _must_have_tags(world: World, read: InFlight, seen: tuple[bytes, ...]) -> None:
    """A copy of what is leased, and not overwritten, is not refused."""
    export = world.exports.exports.get(read.key)
    if export is None or export.state in ENDED or read.peer != world.p:
        return
    index = KEYS.index(read.key)
    for block, found in zip(read.remote_blocks, seen, strict=True):
        size = world.setup.p_block
        group, at = place_of(world.setup, index, block * size)
        count = 1 if world.setup.kinds[group] is KVKind.STATE else size
        written = all(
            world.p_blocks[each] == content(world.setup, index, each, world.p)
            for each in range(block * size, block * size + count)
        )
        if written and found != tag(world.setup, read.key, group, at // size):
            raise Broken(f"block {block} of {read.key} is leased without its tag")


def read_fails(world: World, n: int) -> None:
    """The transport gives a read up for good."""
    read = world.reads[n]
    if read.landing is not None:
        agent.refuse(world, n)
        return
    world.reads = world.reads[:n] + world.reads[n + 1 :]
    if read.slot is None:
        ended = world.at_d("copy_ended", read.key, read.part, NOW, FailCause.PEER, "failed")
        world.d_does(ended)
        return
    _owned_or_quarantined(world, read.slot, read.key)
    world.d_does(world.at_d("read_ended", read.slot, NOW, FailCause.PEER, "failed"))


def _owned_or_quarantined(world: World, slot: int, key: object) -> None:
    held = world.imports.ring[slot]
    if world.setup.strict_slots and held.key != key:
        raise Broken(f"a read of {key} ends in slot {slot}, which is {held}")


def unpack(world: World, n: int) -> None:
    """D checks what has come, and copies it from its slot, if it lies in one."""
    todo = world.unpacks[n]
    world.unpacks = world.unpacks[:n] + world.unpacks[n + 1 :]
    index = KEYS.index(todo.key)
    use: Use = world.use[index]
    if use.ended and use.blocks_free:
        raise Broken(f"{todo} writes blocks that are free")
    fault = None
    if todo.slot is not None:
        kind = world.setup.kinds[todo.group]
        block = place_in(kind, todo.block_ids, todo.start, todo.start, world.setup.d_block)
        found = world.d_slots[todo.slot]
        at = 0 if kind is KVKind.STATE else todo.start // BLOCK
        theirs = home(world.setup, index)[todo.group][at]
        if world.setup.heads and found != content(world.setup, index, theirs, todo.peer):
            fault = FailCause.IDENTITY
        else:
            world.d_blocks = replaced(world.d_blocks, block, found)
    else:
        fault = _check(world, todo)
    d_takes(world, d_events.Unpacked(todo.key, todo.index, fault))
    pull = world.imports.pulls.get(todo.key)
    if fault is not None and pull is not None and pull.state not in (DState.FAILING, DState.CLOSED):
        raise Broken(f"{todo.key} goes on with the tag of another")


def _check(world: World, todo: Unpack) -> FailCause | None:
    (found,) = [each for each in world.seen if each[:2] == (todo.key, todo.index)]
    world.seen = tuple(each for each in world.seen if each is not found)
    fault = fault_of_copy(todo, b"".join(found[2]), hashes(world.setup), world.setup.p_block)
    return fault[0] if fault is not None and world.setup.compares else None
