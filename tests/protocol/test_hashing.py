"""Block hashes: equal exactly when everything before is equal."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.hashing import extend_hashes, hash_blocks, root_hash

ROOT = root_hash(fingerprint="model", block_size=4)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(IDS, IDS)
def test_a_shared_prefix_shares_its_full_blocks_only(left: list[int], right: list[int]) -> None:
    """Hashes agree block by block exactly as long as the ids do."""
    ours, theirs = hash_blocks(ROOT, left, 4), hash_blocks(ROOT, right, 4)

    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        end = 4 * (index + 1)
        assert (mine == other) == (left[:end] == right[:end])


@given(IDS, st.integers(0, 40))
def test_a_chain_extends_to_what_it_would_have_been(ids: list[int], cut: int) -> None:
    """Workers may extend the router's hashes with what they generate."""
    hashes = hash_blocks(ROOT, ids[:cut], 4)
    extend_hashes(hashes, ROOT, ids, 4)

    assert hashes == hash_blocks(ROOT, ids, 4)


def test_the_root_separates_models_adapters_tenants_and_block_sizes() -> None:
    """Nothing that changes KV or its owner can meet in one cache entry."""
    roots = {
        root_hash(fingerprint="a", block_size=4),
        root_hash(fingerprint="b", block_size=4),
        root_hash(fingerprint="a", block_size=8),
        root_hash(fingerprint="a", block_size=4, adapter="x"),
        root_hash(fingerprint="a", block_size=4, salt="x"),
    }

    assert len(roots) == 5


def test_hashes_are_the_same_on_every_machine() -> None:
    """The format is fixed: routers and workers of different builds meet in it."""
    assert hash_blocks(ROOT, [1, 2, 3, 4], 4)[0].hex() == "8edce22cea5ca898c913f9286c7cc85e"


def embeds_of(values: bytes, dtype: str = "float16", hidden_size: int = 2) -> PromptEmbeds:
    return PromptEmbeds(dtype, hidden_size, values)


@given(st.binary(max_size=80), st.binary(max_size=80), IDS)
def test_blocks_of_embeddings_agree_as_far_as_their_vectors(
    left: bytes, right: bytes, ids: list[int]
) -> None:
    """Block by block; ids in the places of vectors count for nothing, those behind them do."""
    ours, theirs = (embeds_of(each[: len(each) // 4 * 4]) for each in (left, right))
    mine, other = (
        hash_blocks(ROOT, [0] * each.num_tokens + ids, 4, each) for each in (ours, theirs)
    )
    for index, (one, two) in enumerate(zip(mine, other, strict=False)):
        end = 4 * (index + 1)
        same = ours.num_tokens == theirs.num_tokens and ours.rows(0, end) == theirs.rows(0, end)
        if end <= min(ours.num_tokens, theirs.num_tokens):
            assert (one == two) == (ours.rows(0, end) == theirs.rows(0, end))
        elif same or ours.num_tokens == theirs.num_tokens:
            assert (one == two) == same
    changed = hash_blocks(ROOT, [9] * ours.num_tokens + ids, 4, ours)
    assert changed == mine
    extended = hash_blocks(ROOT, [0] * ours.num_tokens, 4, ours)
    extend_hashes(extended, ROOT, [0] * ours.num_tokens + ids, 4, ours)
    assert extended == mine


@given(st.binary(min_size=16, max_size=16))
def test_no_ids_give_the_hash_of_vectors(values: bytes) -> None:
    """Not the ids whose bytes these are, nor vectors of another dtype or width with these bytes."""
    ids = list(array("I", values))
    hashes = {
        hash_blocks(ROOT, ids, 4)[0],
        hash_blocks(ROOT, ids, 4, embeds_of(values))[0],
        hash_blocks(ROOT, ids, 4, embeds_of(values, "bfloat16"))[0],
        hash_blocks(ROOT, ids, 4, embeds_of(values, "float32", 1))[0],
        hash_blocks(ROOT, ids, 4, embeds_of(values[:12]))[0],
    }
    assert len(hashes) == 5
