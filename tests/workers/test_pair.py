"""What a pair of engines over a hand-off promises: tokens, blocks, failures, resumes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.engine_run.encoder_models import encoder_of
from tests.engine_run.tiny_models import folder_of
from tests.workers.pair import PROMPT, ROUTER, Pair

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine_core import EngineCore
from tandem.engine.kv_memory import Capacity
from tandem.engine.scheduler.connector import KVConnector
from tandem.kvtransfer.config import KVTransferConfig
from tandem.prefill import worker as prefill_worker
from tandem.prefill.config import PrefillConfig, chunked
from tandem.protocol.card import ModelCard
from tandem.protocol.errors import FailCause, InvalidParameter, Refusal, RefusalCode
from tandem.protocol.ids import RequestKey, new_incarnation
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce
from tandem.protocol.sampling import SamplingParams
from tandem.worker.launch import RoleContext, RoleParts
from tandem.worker.server_config import ServerConfig


@pytest.fixture(params=["tcp", "memory_blocks"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A linked pair: KV goes by slots, and from block to block."""
    made = Pair(request.param)
    yield made
    made.close()


def test_tokens_are_those_of_one_engine(pair: Pair) -> None:
    """P says token 1, D says it again and goes on; afterwards nothing is held."""
    pair.ask("a")
    pair.until(lambda: pair.decode.finished("a") and pair.prefill.free and pair.decode.free)

    tokens = pair.decode.tokens("a")
    assert pair.prefill.tokens("a") == tokens[:1]
    assert [tokens] == pair.alone()
    assert pair.producer.progress() > 0
    assert pair.consumer.progress() > 0


def test_requests_that_share_blocks_share_their_tags() -> None:
    """A tag is of the tokens, not of the request: what a second one computes from the same cached
    blocks while the first's are copied is right for both."""
    pair = Pair("memory_blocks")
    try:
        transport: Any = pair.consumer._mover.parts.transports["memory_blocks"]
        pulls = pair.consumer._mover.table.pulls
        transport.hold.set()
        pair.ask("a")
        pair.until(lambda: any(each.reading for each in pulls.values()))
        pair.ask("b")
        pair.until(lambda: [bool(each.reading) for each in pulls.values()] == [True, True])
        transport.hold.clear()
        pair.until(lambda: pair.decode.finished("a") and pair.decode.finished("b"))
        assert pair.decode.tokens("a") == pair.decode.tokens("b") == pair.alone()[0]
        assert not pair.decode.failed
    finally:
        pair.close()


def test_a_full_hit_brings_only_token_1(pair: Pair) -> None:
    """The second of two equal prompts of whole blocks moves no KV and says the same."""
    prompt = PROMPT[:64]
    pair.ask("a", prompt)
    pair.until(lambda: pair.decode.finished("a") and pair.decode.free)
    pair.ask("b", prompt)
    pair.until(lambda: pair.decode.finished("b") and pair.prefill.free and pair.decode.free)

    assert pair.decode.tokens("b") == pair.decode.tokens("a")


def test_choices_share_one_hand_off(pair: Pair) -> None:
    """n first tokens come over once; each choice equals that of one engine."""
    settings: dict[str, Any] = {"n": 3, "temperature": 0.9, "max_tokens": 6}
    pair.ask("a", **settings)
    pair.until(lambda: all(pair.decode.finished("a", n) for n in range(3)) and pair.prefill.free)

    assert [pair.decode.tokens("a", n) for n in range(3)] == pair.alone(**settings)


def test_token_1_may_end_it(pair: Pair) -> None:
    """A stop id as token 1: P says so, D brings nothing and holds nothing."""
    first = pair.alone()[0][0]
    pair.ask("a", stop_token_ids=(first,))
    pair.until(lambda: pair.prefill.finished("a") and pair.prefill.free and pair.decode.free)

    assert pair.prefill.tokens("a") == [first]


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_cancel_frees_both_ends(pair: Pair, where: str) -> None:
    """Whichever leg is cancelled while KV moves, both are free soon after."""
    key = pair.ask("a", max_tokens=100)
    pair.prefill.step()
    pair.decode.step()
    getattr(pair, where).core.abort(key)
    pair.until(lambda: pair.prefill.free and pair.decode.free)

    other = pair.decode.failed if where == "prefill" else pair.prefill.failed
    assert all(each.cause is FailCause.GONE for each in other)


@pytest.mark.parametrize("who", ["its request", "its router"])
def test_a_cancel_after_the_hand_over_ends_the_lease(pair: Pair, who: str) -> None:
    """P is through with a request that D has not begun to fetch: the lease has half a minute left
    and ends at once, though the engine no longer knows the key."""
    key = pair.ask("a", budget_ms=600_000, max_tokens=100)
    pair.decode_stands = True
    pair.until(lambda: not pair.prefill.core.holds(key))
    assert pair.producer.leased_blocks() > 0
    if who == "its request":
        assert not pair.prefill.core.abort(key)
    else:
        assert pair.prefill.core.abort_router(ROUTER) == 0
    pair.until(lambda: pair.prefill.free)
    assert pair.producer.leased_blocks() == 0


def test_a_consumer_without_a_link_is_refused(pair: Pair) -> None:
    """A request for a producer that nobody knows is turned away at once, on either side."""
    key = RequestKey(ROUTER, "x", 0)
    params = SamplingParams(seed=1, max_tokens=4)
    for core, kv in (
        (pair.decode.core, Consume(new_incarnation())),
        (pair.prefill.core, Produce(new_incarnation())),
    ):
        request = EngineCoreRequest(key=key, prompt_token_ids=[5] * 40, params=params, kv=kv)
        refusal = core.add(request)
        assert isinstance(refusal, Refusal)
        assert refusal.code is RefusalCode.PEER_UNKNOWN
    assert pair.prefill.free
    assert pair.decode.free


def test_hand_offs_over_the_quota_wait_their_turn() -> None:
    """With room for one export at a time, three requests are all answered, one after another."""
    pair = Pair(kv_lease_quota=0.25)
    try:
        for name in "abc":
            pair.ask(name, [ord(name), *PROMPT[1:]], max_tokens=4)
        pair.until(lambda: all(pair.decode.finished(name) for name in "abc") and pair.prefill.free)
        assert pair.producer.leased_blocks() == 0
    finally:
        pair.close()


def test_roles_tell_the_shell_how_they_are(pair: Pair) -> None:
    """Health of links from D, none from P; no problem on either side."""
    pair.consumer.note_progress(1, has_work=False)
    pair.producer.note_progress(1, has_work=False)
    pair.producer.set_peers({})

    assert [each.up for each in pair.consumer.peer_health()] == [True]
    assert pair.producer.peer_health() == ()
    assert pair.consumer.leased_blocks() == 0
    assert pair.producer.problem() is None
    assert pair.consumer.problem() is None


def test_a_prefill_workers_card_says_how_much_it_hands_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the lease quota holds in all, in tokens: placement asks nobody who has to say no."""
    cards: list[ModelCard] = []

    def launched(
        config: EngineConfig, *_: object, executor: Any, make_role: Any, allocate: object
    ) -> int:
        assert allocate is None, "tcp maps no memory"
        parts: list[RoleParts] = []

        def connect(capacity: Capacity) -> KVConnector | None:
            fingerprint, me = config.fingerprint(capacity.layout), new_incarnation()
            context = RoleContext(
                config, capacity, fingerprint, me, executor, CollectorRegistry(), None, lambda: None
            )
            parts.append(make_role(context))
            return parts[0].connector

        core = EngineCore.launch(config, executor, connect=connect)
        cards.append(core.card(max_handoff_tokens=parts[0].max_handoff_tokens))
        parts[0].handoff.close()
        core.close()
        return 0

    monkeypatch.setattr(prefill_worker, "run_worker", launched)
    config = EngineConfig.of(
        str(folder_of("llama")), device="cpu", revision="tiny", num_gpu_blocks_override=24
    )
    kv = KVTransferConfig(kv_connector="tcp", kv_control_port=0, kv_lease_quota=0.25)
    prefill_worker.run(config, ServerConfig(), kv, PrefillConfig())
    assert cards[0].max_handoff_tokens == 6 * cards[0].block_size


def test_chunks_are_whole_blocks() -> None:
    """The prefill worker cuts prompts at block borders, unless the user says otherwise."""
    folder = str(folder_of("llama"))
    config = EngineConfig.of(folder, device="cpu", block_size=32, revision="tiny")

    kv = KVTransferConfig()
    cut = chunked(config, PrefillConfig(prefill_chunk_tokens=100), kv)
    assert cut.scheduler.long_prefill_token_threshold == 96
    mine = config.with_(long_prefill_token_threshold=50)
    assert chunked(mine, PrefillConfig(), kv).scheduler.long_prefill_token_threshold == 50
    with pytest.raises(InvalidParameter, match="prefill_chunk_tokens"):
        PrefillConfig(prefill_chunk_tokens=4)


@pytest.mark.parametrize(
    ("kv", "lone"),
    [
        ({"kv_connector": "cuda_p2p"}, 8192),
        ({"kv_node_folder": "/run/tandem"}, 8192),
        ({}, None),
        ({"kv_connector": "nixl", "kv_node_folder": "/run/tandem"}, None),
    ],
)
def test_a_prompt_is_cut_by_how_its_kv_travels(kv, lone) -> None:
    """Between GPUs of one machine a prompt that is alone is cut by whole steps; prompts begin
    one after the other on any GPU."""
    folder = str(folder_of("llama"))
    on_cpu = EngineConfig.of(folder, device="cpu", revision="tiny", max_num_batched_tokens=8192)
    config = replace(on_cpu, device="cuda")
    cut = chunked(config, PrefillConfig(), KVTransferConfig(**kv)).scheduler
    assert cut.long_prefill_token_threshold == cut.max_num_begun_tokens == 2048
    assert cut.lone_prefill_token_threshold == lone


DRAWN: dict[str, Any] = {
    "temperature": 0.9,
    "presence_penalty": 0.7,
    "repetition_penalty": 1.2,
    "min_tokens": 8,
    "stop_token_ids": tuple(range(100, 200)),
    "logprobs": 1,
    "max_tokens": 12,
}
"""Everything that counts output tokens: a prompt that swallowed the emitted ones would differ."""


@pytest.mark.full
@pytest.mark.parametrize("known", [1, 5, 8])
def test_hole_20_a_resumed_draw_contradicts_nothing(pair: Pair, known: int) -> None:
    """Forced tokens are not drawn again, on P or D, and the seed goes on at its position."""
    whole = pair.alone(**DRAWN)[0]
    assert len(whole) > known

    pair.ask("a", emitted=[whole[:known]], **DRAWN)
    pair.until(lambda: pair.decode.finished("a") and pair.prefill.free and pair.decode.free)

    assert pair.prefill.tokens("a") == whole[known : known + 1]
    assert pair.decode.tokens("a") == whole[known:]


@pytest.mark.full
@pytest.mark.parametrize("known", [1, 7])
def test_hole_21_emitted_tokens_are_no_prompt(pair: Pair, known: int) -> None:
    """Positions, minimum and maximum count from the first attempt's first token."""
    whole = pair.alone(**DRAWN)[0]

    pair.ask("a", emitted=[whole[:known]], **DRAWN)
    pair.until(lambda: pair.decode.finished("a") and pair.prefill.free)

    outputs = [each for each in pair.decode.outputs if each.request == "a"]
    assert outputs[0].position == known
    assert known + len(pair.decode.tokens("a")) == len(whole)
    alone = [each for each in pair.decode.outputs if each.request == "alone"]
    assert outputs[-1].finish == alone[-1].finish


def test_an_encoders_prompts_are_cut_by_nobody() -> None:
    """They are computed whole, and a wish for chunks is refused by name."""
    config = EngineConfig.of(encoder_of("bert")[0], device="cpu", revision="tiny")
    kv = KVTransferConfig()
    assert chunked(config, PrefillConfig(), kv) is config
    with pytest.raises(InvalidParameter, match=r"prefill_chunk_tokens: 32 .*in one step"):
        chunked(config, PrefillConfig(prefill_chunk_tokens=32), kv)


def test_hole_24_only_the_producer_samples_token_1(pair: Pair) -> None:
    """However long D steps before P does, it says nothing; then it repeats P's token."""
    pair.ask("a")
    for _ in range(50):
        pair.decode.step()
    assert pair.decode.outputs == []

    pair.until(lambda: pair.decode.finished("a"))
    assert pair.decode.tokens("a")[:1] == pair.prefill.tokens("a")
