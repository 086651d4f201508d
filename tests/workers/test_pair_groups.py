"""Pairs of engines whose models have windows or recurrent states: tokens equal those of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.engine_run.tiny_models import folder_of
from tests.workers.pair import Pair

FAMILIES = ("mistral-window", "qwen3-window", "gemma3", "qwen3_5")
LONG = tuple(3 + (11 * index + index // 7) % 300 for index in range(203))


@pytest.fixture(params=["tcp", "memory_blocks"])
def connector(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pair_of(family: str, connector: str, sizes: tuple[int, int]) -> Iterator[Pair]:
    """Yield a linked pair with room for two sequences in each pool."""
    blocks = 160 * 16 // min(sizes)
    engine = {"folder": folder_of(family), "num_gpu_blocks_override": blocks}
    made = Pair(connector, block_sizes=sizes, engine=engine)
    try:
        yield made
    finally:
        made.close()


def drain(pair: Pair, name: str) -> list[int]:
    pair.until(lambda: pair.decode.finished(name) or bool(pair.decode.failed))
    assert not pair.decode.failed
    pair.until(lambda: not pair.prefill.core.has_work and not pair.decode.core.has_work)
    return pair.decode.tokens(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_one_engine(family: str, connector: str) -> None:
    """A cold hand-off, one whose prompt both ends have cached, and one that extends the answer."""
    for pair in pair_of(family, connector, (16, 16)):
        pair.ask("a", LONG, max_tokens=40)
        cold = drain(pair, "a")
        pair.ask("b", LONG, max_tokens=40)
        assert drain(pair, "b") == cold
        longer = (*LONG, *cold, 5, 6, 7)
        pair.ask("c", longer, max_tokens=12)
        extended = drain(pair, "c")
        assert pair.consumer.progress() > 0
        pair.decode.core.manager.reset_prefix_cache()
        assert pair.alone(LONG, max_tokens=40) == [cold]
        pair.decode.outputs.clear()
        assert pair.alone(longer, max_tokens=12) == [extended]
        pair.decode.core.check_integrity()
        pair.prefill.core.check_integrity()


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(16, 64), (64, 16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_unequal_blocks_change_no_token(
    family: str, connector: str, sizes: tuple[int, int]
) -> None:
    """Prefix hits at D of every length after a hand-off from smaller or larger blocks."""
    for pair in pair_of(family, connector, sizes):
        pair.ask("a", LONG, max_tokens=30)
        cold = drain(pair, "a")
        pair.ask("b", LONG, max_tokens=30)
        assert drain(pair, "b") == cold
        for cut in (64, 128, 191, 203):
            pair.decode.outputs.clear()
            (warm,) = pair.alone(LONG[:cut], max_tokens=8)
            pair.decode.core.manager.reset_prefix_cache()
            pair.decode.outputs.clear()
            assert pair.alone(LONG[:cut], max_tokens=8) == [warm]
            pair.ask(f"again {cut}", LONG, max_tokens=30)
            assert drain(pair, f"again {cut}") == cold
