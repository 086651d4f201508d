"""Host blocks: found, used, given away in the order of use, and never while somebody reads them."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.offload.lru import LRUBlocks
from tandem.protocol.ids import BlockHash


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


def digest(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def test_the_least_recently_used_makes_room():
    """Use moves a hash to the end of the line."""
    blocks = LRUBlocks(2)
    assert blocks.put(name(1)) == (0, None)
    assert blocks.put(name(2)) == (1, None)
    blocks.touch(name(1))
    assert blocks.put(name(3)) == (1, name(2))
    assert blocks.find(name(2)) is None
    assert set(blocks.hashes()) == {name(1), name(3)}


def test_pinned_blocks_stay_and_forgotten_ones_come_back_once_free():
    """All pinned: no room. Forgotten while pinned: used again only after the last unpin."""
    blocks = LRUBlocks(1)
    blocks.put(name(1))
    blocks.pin([0])
    blocks.pin([0])
    assert blocks.put(name(2)) is None
    assert blocks.forget(name(1))
    assert not blocks.forget(name(1))
    blocks.unpin([0])
    assert blocks.put(name(2)) is None
    blocks.unpin([0])
    assert blocks.put(name(2)) == (0, None)


class Looks(Counter[int]):
    """Pins that count how often somebody asks whether a block has one."""

    count = 0

    def __contains__(self, block: object) -> bool:
        self.count += 1
        return super().__contains__(block)


def test_many_pinned_at_the_old_end_are_passed_once():
    """A long prefix that is brought back while as many blocks are lost: a step asks of each pinned
    block once, not at each loss; also where there is nothing else to give away."""
    for num_blocks in (1_000, 250):
        blocks, num = LRUBlocks(num_blocks), 250
        for number in range(num_blocks):
            blocks.put(digest(number))
        blocks.pin(range(num))
        looks = blocks._pins = Looks(blocks._pins)
        placed = [blocks.put(digest(num_blocks + number)) for number in range(num)]
        assert looks.count <= 2 * num
        assert (placed[0] is None) == (num_blocks == num)
        assert all(blocks.find(digest(number)) == number for number in range(num))


def test_who_was_passed_goes_first_again_once_unpinned():
    """In the order of use; who was used while pinned is behind those that were not."""
    blocks = LRUBlocks(4)
    for number in range(4):
        blocks.put(name(number))
    blocks.pin([0, 1, 2])
    assert blocks.put(name(4)) == (3, name(3))
    assert blocks.put(name(5)) == (3, name(4))
    blocks.touch(name(1))
    blocks.unpin([0, 1, 2])
    lost = [placed[1] for n in range(6, 10) if (placed := blocks.put(name(n))) is not None]
    assert lost == [name(0), name(2), name(5), name(1)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ptfnu"), st.integers(0, 5)), max_size=60))
def test_no_block_has_two_hashes_or_is_lost(calls):
    """Whatever is called: each block is under one hash, empty, or pinned for a forgotten one."""
    blocks, pinned = LRUBlocks(3), []
    for call, number in calls:
        found = blocks.find(name(number))
        if call == "p" and found is None:
            before = {blocks.find(each) for each in blocks.hashes()}
            placed = blocks.put(name(number))
            if placed is not None:
                assert placed[0] not in pinned
                assert (placed[1] is None) == (placed[0] not in before)
        elif call == "t" and found is not None:
            blocks.touch(name(number))
        elif call == "f":
            blocks.forget(name(number))
        elif call == "n" and found is not None:
            blocks.pin([found])
            pinned.append(found)
        elif call == "u" and pinned:
            blocks.unpin([pinned.pop(0)])
    while pinned:
        blocks.unpin([pinned.pop()])
    for number in range(10, 13):
        assert blocks.put(name(number)) is not None
    assert len(blocks) == len(set(map(blocks.find, blocks.hashes()))) == 3
