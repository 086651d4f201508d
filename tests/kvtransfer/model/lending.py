"""P's engine where D pulls what P has cached: nothing is computed for it, and what is not lent is
anybody's to evict. The step that writes the cached blocks may still be under way when D asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from tests.kvtransfer.model.blocks import content, home, in_blocks
from tests.kvtransfer.model.parts import JUNK, KEYS, NOW, Work

from tandem.kvtransfer.handoff import export as p_events
from tandem.protocol.ids import BlockHash

if TYPE_CHECKING:
    from tests.kvtransfer.model.world import World

ASKED = (BlockHash(bytes(16)),)
"""What D's OPEN says that it pulls; which blocks they are, the world knows."""


def lending_moves(world: World, index: int) -> Iterator[tuple[str, Callable[[World], None]]]:
    work, lending = world.work[index], world.setup.lends
    assert lending is not None
    written = is_written(world, index)
    if not (work.evicted or work.wrote):
        yield f"write {index}", partial(_write, index=index)
    if not work.evicted and not (lending.holds and _is_held(world, index)):
        yield f"evict {index}", partial(evict, index=index)
    if work.asked and work.step == 0:
        yield f"lend {index}", partial(_lend, index=index)
    lent = work.step and not work.fenced and not work.released
    if lent and (written or not lending.fences or work.evicted):
        yield f"fence {index}", partial(_fence, index=index)


def asked(work: tuple[Work, ...], index: int) -> tuple[Work, ...]:
    """P's engine hears that D asks for a key."""
    return (*work[:index], work[index]._replace(asked=True), *work[index + 1 :])


def is_written(world: World, index: int) -> bool:
    """Whether the cached blocks hold what they are cached as."""
    return all(world.p_blocks[block] == what for block, what in _contents(world, index))


def evict(world: World, index: int) -> None:
    """The blocks are another prompt's, for every key that had them cached."""
    _note(world, index, evicted=True)
    _put(world, {block: JUNK for block, _ in _contents(world, index)})


def _write(world: World, index: int) -> None:
    _note(world, index, wrote=True)
    _put(world, dict(_contents(world, index)))


def _lend(world: World, index: int) -> None:
    """Lend what is there, or decline: at once, as nobody waits for an engine's turn twice."""
    setup, key = world.setup, KEYS[index]
    if world.work[index].evicted:
        _become(world, index, step=1, first=True, done=True, released=True)
        _tell(world, p_events.Refuse(key))
        return
    up = world.d in world.exports.links
    _become(world, index, step=setup.num_blocks + 1, first=True, done=True)
    _tell(world, p_events.Admit(key, world.d, setup.num_blocks, 40, up, setup.direct))
    lent = in_blocks(setup, home(setup, index), setup.num_blocks, setup.p_block)
    _tell(world, p_events.Launched(key, lent, setup.num_blocks))
    _tell(world, p_events.First(key, (), None))
    _tell(world, p_events.Finished(key, cancelled=False))


def _fence(world: World, index: int) -> None:
    count = world.setup.num_blocks
    _become(world, index, fenced=count)
    _tell(world, p_events.Fenced(KEYS[index], count))


def _note(world: World, index: int, **what: bool) -> None:
    mine = home(world.setup, index)
    world.work = tuple(
        each._replace(**what) if home(world.setup, n) == mine else each
        for n, each in enumerate(world.work)
    )


def _is_held(world: World, index: int) -> bool:
    return any(world.holds(index, other) for other in range(world.setup.num_keys))


def _contents(world: World, index: int) -> list[tuple[int, object]]:
    blocks = [block for table in home(world.setup, index) for block in table]
    return [(block, content(world.setup, index, block, world.p)) for block in blocks]


def _put(world: World, what: dict[int, object]) -> None:
    world.p_blocks = tuple(what.get(at, each) for at, each in enumerate(world.p_blocks))


def _become(world: World, index: int, **changes: int) -> None:
    mine = world.work[index]._replace(**changes)  # type: ignore[arg-type]
    world.work = (*world.work[:index], mine, *world.work[index + 1 :])


def _tell(world: World, event: p_events.Event) -> None:
    world.p_does(world.at_p("apply", event, NOW))
