"""What a step leaves behind: no cycle, which would keep its tensors until the collector comes."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from tests.engine_run.cpu_engine import GREEDY, CPUEngine
from tests.engine_run.embedded import embeds_for
from tests.engine_run.encoder_models import encoder_of
from tests.engine_run.tiny_models import folder_of

from tandem.engine.attention import StepSequences
from tandem.engine.models import StepContext
from tandem.protocol.pooling import PoolingParams
from tandem.protocol.sampling import SamplingParams

PROMPTS = [[(11 * each + 7 * at) % 300 + 5 for at in range(20 + 9 * each)] for each in range(3)]
OURS = ("tandem.", "torch")
DRAWN = {
    "greedy": GREEDY,
    "rules": SamplingParams(
        temperature=0.8, top_p=0.9, seed=5, repetition_penalty=1.3, bad_words_token_ids=((7, 9),)
    ),
    "scores": SamplingParams(temperature=0.9, seed=3, logprobs=3, prompt_logprobs=2),
}


@contextmanager
def garbage() -> Iterator[Counter[str]]:
    """Objects of ours and of torch, by type, that the block left in cycles, counted as it ends; the
    collector rests meanwhile."""
    found: Counter[str] = Counter()
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        types = map(type, gc.garbage)
        found.update(each.__qualname__ for each in types if each.__module__.startswith(OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        if was_on:
            gc.enable()


def test_a_steps_context_goes_with_its_last_user():
    """Its tensors, too, though products have asked for its rows."""
    ends = torch.tensor([0, 3], dtype=torch.int32)
    sequences = StepSequences(
        num_decodes=0,
        cu_seqlens_q=ends,
        chunk_cu_seqlens_q=ends,
        seq_lens=ends[1:],
        block_tables=ends[:1].view(1, 1, 1),
        max_query_len=3,
        max_decode_len=0,
        max_chunk_len=3,
    )
    unused = cast("Any", None)
    step = StepContext(
        rotaries=(),
        positions=torch.arange(3),
        slot_mapping=unused,
        attention=unused,
        sequences=sequences,
        kv=(),
    )
    held = step.rows, step.rows_at(torch.tensor([2]))
    assert held[0].sequences.tolist() == [0, 0, 0]
    assert held[1].positions.tolist() == [2]
    gone = weakref.ref(step)
    with garbage() as found:
        del step
        assert gone() is None
    assert not found


@pytest.fixture(scope="module")
def engine() -> CPUEngine:
    """A decoder that has prompts in chunks."""
    folder = folder_of("llama")
    settings: dict[str, Any] = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 24}
    return CPUEngine(folder, enable_prompt_embeds=True, async_scheduling=True, **settings)


@pytest.mark.parametrize("kind", DRAWN)
def test_steps_of_a_decoder_leave_no_cycle(engine: CPUEngine, kind: str):
    """In chunks, mixed with decodes, launched ahead, with scores and with rules."""
    engine.generate(PROMPTS, 2, DRAWN[kind])
    with garbage() as found:
        engine.generate(PROMPTS, 4, DRAWN[kind])
    assert not found


def test_steps_of_vectors_leave_no_cycle(engine: CPUEngine):
    """Prompts that come as vectors, which are large, and prompts that become one."""
    embeds = embeds_for(folder_of("llama"), PROMPTS[2])
    with garbage() as found:
        engine.add_embeds(embeds, 3)
        engine.pool(PROMPTS[1], PoolingParams())
        engine.run()
    assert not found


def test_steps_of_an_encoder_leave_no_cycle():
    """Its layers ask for rows, too."""
    engine = CPUEngine(encoder_of("bert")[0])
    with garbage() as found:
        engine.pool(PROMPTS[0], PoolingParams())
        engine.run()
    assert not found
