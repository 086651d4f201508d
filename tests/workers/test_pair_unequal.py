"""Engines whose blocks differ in size: tokens, and prefix hits in each one's own blocks."""

from __future__ import annotations

from typing import Any

import pytest
from tests.workers.pair import PROMPT, Pair

pytestmark = pytest.mark.full


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (32, 16)])
@pytest.mark.parametrize("connector", ["tcp", "memory_blocks"])
def test_tokens_are_those_of_one_engine_and_hits_count_in_own_blocks(
    connector: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold; then again, when both have the prompt cached as far as their blocks are full."""
    pair = Pair(connector, block_sizes=sizes)
    begin_load, wanted_from = pair.consumer.begin_load, []

    def noted(key: Any, blocks: Any, start: int, *rest: Any) -> None:
        wanted_from.append(start)
        begin_load(key, blocks, start, *rest)

    monkeypatch.setattr(pair.consumer, "begin_load", noted)
    try:
        for name in ("a", "b"):
            pair.ask(name)
            pair.until(lambda name=name: pair.decode.finished(name))  # type: ignore[misc]
            pair.until(lambda: pair.prefill.free and pair.decode.free)
        assert not pair.decode.failed
        assert pair.consumer.progress() > 0
        cached = [each.num_cached_tokens for each in pair.prefill.outputs]
        assert cached == [0, len(PROMPT) // sizes[0] * sizes[0]]
        assert wanted_from == [0, len(PROMPT) // sizes[1] * sizes[1]]
        (tokens,) = pair.alone()
        assert tokens == pair.decode.tokens("a") == pair.decode.tokens("b")
    finally:
        pair.close()
