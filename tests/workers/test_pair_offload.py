"""A pair whose engines both have a CPU tier: hand-off and offload beside each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.engine_run.tiny_models import folder_of
from tests.workers.pair import PROMPT, ROUTER, Half, Pair

from tandem.engine.config import EngineConfig
from tandem.engine.offload.connector import OffloadStats
from tandem.protocol.ids import RequestKey
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

BYTES = EngineConfig.of(folder_of("llama"), device="cpu", dtype="float32").layout.block_bytes
OTHERS = [[(13 * each + 5 * at) % 300 + 5 for at in range(70)] for each in range(4)]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Caches of 9 blocks, which one prompt of 75 tokens and its answer nearly fill."""
    small = {"num_gpu_blocks_override": 9, "kv_offloading_size": 80 * BYTES / 2**30}
    made = Pair(engine=small)
    yield made
    made.close()


def stats_of(half: Half) -> OffloadStats:
    assert half.core._offload is not None
    return half.core._offload.stats


def push_out(pair: Pair, half: Half, name: str) -> None:
    for number, prompt in enumerate(OTHERS):
        key = RequestKey(ROUTER, f"{name}-{number}", 0)
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=2)
        request = EngineCoreRequest(key=key, prompt_token_ids=prompt, params=params)
        assert half.core.add(request) is None
        pair.until(lambda key=key: half.finished(key.request) and half.free)  # type: ignore[misc]


def test_p_hands_over_what_comes_from_host_memory(pair: Pair) -> None:
    """P's second answer to a prompt is loaded, not computed, and D's tokens are the same."""
    pair.ask("a")
    pair.until(lambda: pair.decode.finished("a") and pair.prefill.free and pair.decode.free)
    push_out(pair, pair.prefill, "p")
    push_out(pair, pair.decode, "d")
    assert stats_of(pair.prefill).hit_tokens == 0

    pair.ask("b")
    pair.until(lambda: pair.decode.finished("b") and pair.prefill.free and pair.decode.free)
    assert pair.decode.tokens("b") == pair.decode.tokens("a")
    assert pair.prefill.tokens("b") == pair.decode.tokens("a")[:1]
    assert stats_of(pair.prefill).hit_tokens == 64


def test_d_keeps_what_its_blocks_held_before_a_hand_off_writes_them(pair: Pair) -> None:
    """What D computed itself goes to host memory when a hand-off takes its blocks, and comes back
    whole: the peer's writes, which no step orders, came after."""
    alone = pair.alone()
    for number, prompt in enumerate(OTHERS):
        pair.ask(f"h{number}", prompt)
        done = f"h{number}"
        pair.until(lambda done=done: pair.decode.finished(done) and pair.decode.free)  # type: ignore[misc]
    assert stats_of(pair.decode).num_stored > 0
    before = stats_of(pair.decode).hit_tokens

    key = RequestKey(ROUTER, "again", 0)
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=10)
    request = EngineCoreRequest(key=key, prompt_token_ids=list(PROMPT), params=params)
    assert pair.decode.core.add(request) is None
    pair.until(lambda: pair.decode.finished("again") and pair.prefill.free and pair.decode.free)
    assert [pair.decode.tokens("again")] == alone
    assert stats_of(pair.decode).hit_tokens == before + 64


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_cancel_frees_both_ends(pair: Pair, where: str) -> None:
    """Whatever loads or moves just then, by either connector."""
    pair.ask("a")
    pair.until(lambda: pair.decode.finished("a") and pair.prefill.free and pair.decode.free)
    push_out(pair, pair.prefill, "p")
    key = pair.ask("b", max_tokens=50)
    pair.prefill.step()
    pair.decode.step()
    getattr(pair, where).core.abort(key)
    pair.until(lambda: pair.prefill.free and pair.decode.free)
    for half in (pair.prefill, pair.decode):
        half.core.check_integrity()
