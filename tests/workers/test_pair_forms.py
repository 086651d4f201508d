"""Pairs of engines over packed weights: hand-offs and prefix hits change no token."""

from __future__ import annotations

import pytest
from tests.engine_run.form_models import form_folders, judged_form
from tests.workers.pair import Pair
from tests.workers.test_pair_groups import drain

NAME = "llama-untied-biased"
LONG = tuple(3 + (11 * index + index // 7) % 300 for index in range(90))


@pytest.mark.full
@pytest.mark.parametrize("form", ["gptq-v2-ordered", "float-channel", "int8", "nvfp4"])
def test_a_hand_off_and_a_prefix_hit_have_the_tokens_of_the_weights(form: str) -> None:
    """The prompt's KV is P's; a longer prompt continues what D holds."""
    engine = {"folder": form_folders(form, NAME)[0], "num_gpu_blocks_override": 40}
    longer = (*LONG, 5, 6, 7)
    wanted = judged_form(form, NAME, [list(LONG), list(longer)], 6)
    pair = Pair(engine=engine)
    try:
        for name, prompt, want in zip("ab", (LONG, longer), wanted, strict=True):
            pair.ask(name, prompt, max_tokens=6)
            assert drain(pair, name) == want
    finally:
        pair.close()
