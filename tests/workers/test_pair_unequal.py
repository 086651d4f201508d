"""Engines whose blocks differ in size: tokens, and prefix hits in each one's own blocks."""

from __future__ import annotations

import pytest
from tests.workers.pair import PROMPT, Half, Pair


def cached(half: Half) -> int:
    """Tokens that it has found in its own cache so far."""
    return half.core.scheduler.roster.stats.hit_tokens


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (32, 16)])
@pytest.mark.parametrize("connector", ["tcp", "memory_blocks"])
def test_tokens_are_those_of_one_engine_and_hits_count_in_own_blocks(
    connector: str, sizes: tuple[int, int]
) -> None:
    """Cold; then again, when both have the prompt cached as far as their blocks are full."""
    pair = Pair(connector, block_sizes=sizes)
    try:
        for name in ("a", "b"):
            assert cached(pair.prefill) == cached(pair.decode) == 0
            pair.ask(name)
            pair.until(lambda name=name: pair.decode.finished(name))  # type: ignore[misc]
            pair.until(lambda: pair.prefill.free and pair.decode.free)
        assert not pair.decode.failed
        assert pair.consumer.progress() > 0
        for half, size in zip((pair.prefill, pair.decode), sizes, strict=True):
            assert cached(half) == len(PROMPT) // size * size
        (tokens,) = pair.alone()
        assert tokens == pair.decode.tokens("a") == pair.decode.tokens("b")
    finally:
        pair.close()
