"""Sizes of blocks, and which workers may exchange them."""

import msgspec

from tandem.protocol.card import Fingerprint, KVGroup, KVKind, KVLayout, blocks_for

GROUP = KVGroup(num_layers=36, num_kv_heads=8, head_dim=128, block_size=64, dtype="bfloat16")


def test_a_block_of_qwen3_8b_is_nine_mebibytes() -> None:
    """36 layers, K and V, 8 heads of 128 in two bytes, 64 tokens."""
    assert KVLayout((GROUP,)).block_bytes == 9 << 20
    assert GROUP.block_shape == (36, 2, 8, 64, 128)


def test_a_latent_has_no_values_and_no_heads() -> None:
    """61 layers of DeepSeek-V3: 512 numbers and a rotated key of 64, in two bytes."""
    group = msgspec.structs.replace(
        GROUP, num_layers=61, num_kv_heads=1, head_dim=576, kind=KVKind.LATENT
    )
    assert group.block_shape == (61, 1, 1, 64, 576)
    assert KVLayout((group,)).token_bytes == 61 * 576 * 2


def test_blocks_round_up() -> None:
    """A partial block is a block."""
    assert [blocks_for(tokens, 16) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_every_field_separates_fingerprints() -> None:
    """Workers that differ in anything that shapes KV never meet."""
    base = Fingerprint(revision="r", dtype="bfloat16", layout=KVLayout((GROUP,)))
    other = KVLayout((msgspec.structs.replace(GROUP, block_size=16),))
    changed = [
        msgspec.structs.replace(base, revision="s"),
        msgspec.structs.replace(base, dtype="float16"),
        msgspec.structs.replace(base, layout=other),
        msgspec.structs.replace(base, tensor_parallel_size=2),
        msgspec.structs.replace(base, version=99),
    ]

    assert len({print_.digest for print_ in [base, *changed]}) == 6
