"""Bytes of KV that a request of Gemma 3 270M holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine_run.kv_bytes import LENGTHS, held, table

from tandem.protocol.card import KVKind

LAYERS = {KVKind.FULL: 3, KVKind.WINDOW: 15}
LAYER_BLOCK_BYTES = 2 * 16 * 256 * 2
"""Keys and values of 16 tokens, one head of 256 in bfloat16, in one layer."""


@pytest.mark.parametrize("num_tokens", [100, 511, 2000, *LENGTHS])
def test_a_decoding_request_holds_its_tokens_once_and_its_windows(num_tokens: int) -> None:
    """The last token is at position ``num_tokens``; windows begin 511 before it. Blocks leave a
    window when the next ones are allocated."""
    found = held(num_tokens)
    spans = num_tokens // 16 + 1
    blocks = {KVKind.FULL: spans, KVKind.WINDOW: spans - max(0, num_tokens - 511) // 16}
    assert found.blocks == tuple(blocks[kind] for kind in found.kinds)
    for kind, count in blocks.items():
        assert found.bytes_of(kind) == LAYERS[kind] * count * LAYER_BLOCK_BYTES


def test_the_documented_table_is_what_an_engine_holds() -> None:
    page = Path(__file__).parents[2] / "docs" / "performance.md"
    assert table() in page.read_text(encoding="utf-8")
