"""Pairs of engines whose models have windows or recurrent states: prefix hits change no token.

Hand-offs that are cold or cached are compared with transformers in test_paths.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.engine_run.tiny_models import folder_of
from tests.workers.pair import Pair

FAMILIES = ("mistral-window", "gemma3", "qwen3_5")
LONG = tuple(3 + (11 * index + index // 7) % 300 for index in range(203))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of OpenMP wait for each other by spinning, which takes long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def pair_of(family: str, sizes: tuple[int, int]) -> Iterator[Pair]:
    """Yield a linked pair with room for two sequences in each pool."""
    blocks = 160 * 16 // min(sizes)
    engine = {"folder": folder_of(family), "num_gpu_blocks_override": blocks}
    made = Pair(block_sizes=sizes, engine=engine)
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
def test_a_prompt_that_extends_an_answer_has_the_tokens_of_one_engine(family: str) -> None:
    """D continues blocks that it computed itself, and P those of the prompt."""
    with pair_of(family, (16, 16)) as pair:
        pair.ask("cold", LONG, max_tokens=24)
        cold = drain(pair, "cold")
        longer = (*LONG, *cold, 5, 6, 7)
        pair.ask("longer", longer, max_tokens=8)
        extended = drain(pair, "longer")
        pair.decode.core.manager.reset_prefix_cache()
        assert pair.alone(LONG, max_tokens=24) == [cold]
        pair.decode.outputs.clear()
        assert pair.alone(longer, max_tokens=8) == [extended]
        pair.decode.core.check_integrity()
        pair.prefill.core.check_integrity()


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(16, 64), (64, 16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_unequal_blocks_change_no_token(family: str, sizes: tuple[int, int]) -> None:
    """Prefix hits at D of every length after a hand-off from smaller or larger blocks."""
    with pair_of(family, sizes) as pair:
        pair.ask("cold", LONG, max_tokens=12)
        cold = drain(pair, "cold")
        for cut in (64, 128, 191, 203):
            pair.decode.outputs.clear()
            (warm,) = pair.alone(LONG[:cut], max_tokens=4)
            pair.decode.core.manager.reset_prefix_cache()
            pair.decode.outputs.clear()
            assert pair.alone(LONG[:cut], max_tokens=4) == [warm]
            pair.ask(f"again {cut}", LONG, max_tokens=12)
            assert drain(pair, f"again {cut}") == cold
