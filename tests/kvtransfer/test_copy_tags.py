"""How tags of hundreds of blocks are compared."""

from __future__ import annotations

import random

import pytest
from tests.kvtransfer.builders import make_key

from tandem.kvtransfer.handoff.actions import Unpack
from tandem.kvtransfer.memory.blocks import CLEARED, BlockTags, SharedTags, tag_of, tags_from
from tandem.kvtransfer.mover.make_slots import fault_of_copy
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash, Incarnation

PEER = Incarnation(b"p" * 16)
BLOCK = 4 << 20
HASHES = tuple(BlockHash(bytes([number]) * 16) for number in range(5))


def test_tags_of_many_blocks_are_those_of_each() -> None:
    """Hashes as far as they go, then the key's own; of another group they are named."""
    key = make_key("a")
    for group in (0, 1):
        wanted = [tag_of(key, group, index, HASHES) for index in range(2, 8)]
        assert tags_from(key, group, 2, 6, HASHES) == wanted


@pytest.mark.parametrize("kind", [BlockTags, SharedTags])
def test_tags_that_are_set_at_once_are_as_if_set_one_by_one(kind: type[BlockTags]) -> None:
    """Whatever requests share with others, and whoever lets go first: tags, turns and holders."""
    draw = random.Random(7)
    at_once, singly = kind(16), kind(16)
    keys = [make_key(name) for name in "abcd"]
    for _ in range(400):
        key = draw.choice(keys)
        if draw.random() < 0.4:
            at_once.clear(key)
            singly.clear(key)
        else:
            blocks = draw.sample(range(16), draw.randint(1, 6))
            tags = [bytes([draw.randint(1, 3)]) * 16 for _ in blocks]
            at_once.set_many(key, blocks, tags)
            for block, tag in zip(blocks, tags, strict=True):
                singly.set(key, block, tag)
        for block in range(16):
            assert at_once.read(block) == singly.read(block)
            assert at_once.turn(block) == singly.turn(block)
        assert at_once._holders == singly._holders


@pytest.mark.parametrize(
    ("at", "tag", "cause"),
    [(2, None, None), (2, CLEARED, FailCause.GONE), (1, b"x" * 16, FailCause.IDENTITY)],
)
def test_one_wrong_tag_among_right_ones_is_found(
    at: int, tag: bytes | None, cause: FailCause | None
) -> None:
    """Whichever block has it, and what it says decides who is to blame."""
    key = make_key("a")
    seen = tags_from(key, 0, 1, 4, HASHES)
    if tag is not None:
        seen[at] = tag
    item = Unpack(
        key=key,
        peer=PEER,
        index=0,
        slot=None,
        start=16,
        stop=80,
        nbytes=4 * BLOCK,
        block_ids=(1, 2, 3, 4),
    )
    fault = fault_of_copy(item, b"".join(seen), HASHES, 16)
    assert (None if fault is None else fault[0]) is cause
    if fault is not None:
        assert f"block {at + 1} " in fault[1]
