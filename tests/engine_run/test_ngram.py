"""Prompt lookup over a real model: fewer steps, the same tokens."""

from __future__ import annotations

import pytest
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.test_drafts import COUNT, DRAFTS, PROMPTS, engine, ready, undrafted
from tests.engine_run.test_rows import all_shapes, padded
from tests.engine_run.tiny_models import folder_of

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.outputs import EngineCoreOutput
from tandem.protocol.sampling import SamplingParams


def generated(made: CPUEngine) -> tuple[dict[str, list[int]], int, int, int]:
    """Return tokens by request, steps, drafts and accepted drafts."""
    tokens: dict[str, list[int]] = {}
    steps = drafts = accepted = 0
    while made.core.has_work:
        for outputs in made.core.advance().outputs.values():
            for each in outputs:
                assert isinstance(each, EngineCoreOutput)
                tokens.setdefault(each.request, []).extend(each.token_ids)
        stats = made.core.scheduler.take_stats()
        steps += 1
        drafts += stats.draft_tokens
        accepted += stats.accepted_tokens
    return tokens, steps, drafts, accepted


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["greedy", "seeded", "penalties"])
def test_lookup_changes_no_token(name, overlap):
    made = ready(name, async_scheduling=overlap, speculative_config=DRAFTS)
    graphs = padded(made, all_shapes(4))
    tokens, _, drafts, accepted = generated(made)
    assert tokens == undrafted(name)[0]
    assert drafts > accepted >= 0
    assert any(each.width for each in graphs.replayed)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_that_repeats_itself_takes_fewer_steps(overlap):
    params = SamplingParams(temperature=0.0, seed=0, allowed_token_ids=(40,))
    made = []
    for settings in ({}, {"speculative_config": DRAFTS}):
        each = engine(async_scheduling=overlap, **settings)
        each.add(PROMPTS[0], 3 * COUNT, params)
        made.append(generated(each))
    (plain, steps, *_), (tokens, fewer, drafts, accepted) = made
    assert tokens == plain
    assert fewer < 0.4 * steps
    assert drafts >= accepted > COUNT


def test_a_model_with_states_takes_no_drafts():
    with pytest.raises(InvalidParameter, match="recurrent states"):
        CPUEngine(folder_of("qwen3_5"), speculative_config=DRAFTS)
