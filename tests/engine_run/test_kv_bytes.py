"""Bytes of KV that a request holds, by kind of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engine_run.kv_bytes import (
    DEEPSEEK_V2_LITE,
    GEMMA3_270M,
    LENGTHS,
    MISTRAL_7B,
    QWEN3_5,
    held,
    table,
)

from tandem.protocol.card import KVKind

MODELS = [
    # Three layers in each of six groups; keys and values of one head of 256 in bfloat16.
    (GEMMA3_270M, 512, {KVKind.FULL: 1, KVKind.WINDOW: 5}, 3 * 2 * 16 * 256 * 2),
    (MISTRAL_7B, 4096, {KVKind.WINDOW: 1}, 32 * 2 * 16 * 8 * 128 * 2),
    # A latent and a rotated key for all heads.
    (DEEPSEEK_V2_LITE, 0, {KVKind.LATENT: 1}, 27 * 16 * (512 + 64) * 2),
    # 16 heads' states in float32, larger than keys and values of 16 tokens in six layers.
    (QWEN3_5, 0, {KVKind.FULL: 1, KVKind.STATE: 18}, 16 * (128 * 128 + 3 * 3 * 128) * 4),
]
"""Models with their window, groups by kind, and bytes of a block of 16 tokens."""


@pytest.mark.parametrize("num_tokens", [100, 511, 2000, *LENGTHS])
@pytest.mark.parametrize(("config", "window", "groups", "block_bytes"), MODELS)
def test_a_decoding_request_holds_its_tokens_once_its_windows_and_its_states(
    config: dict[str, Any],
    window: int,
    groups: dict[KVKind, int],
    block_bytes: int,
    num_tokens: int,
) -> None:
    """The last token is at position ``num_tokens``, and windows end with it. Blocks leave a window
    when the next ones are allocated."""
    found = held(num_tokens, config)
    spans = num_tokens // 16 + 1
    left = max(0, num_tokens - window + 1) // 16
    blocks = {KVKind.FULL: spans, KVKind.WINDOW: spans - left, KVKind.STATE: 1}
    blocks[KVKind.LATENT] = spans
    assert found.blocks == tuple(blocks[kind] for kind in found.kinds)
    for kind, count in groups.items():
        assert found.bytes_of(kind) == count * blocks[kind] * block_bytes


def test_the_documented_table_is_what_an_engine_holds() -> None:
    page = Path(__file__).parents[2] / "docs" / "performance.md"
    assert table() in page.read_text(encoding="utf-8")
