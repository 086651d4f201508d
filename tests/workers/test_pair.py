"""A prefill and a decode engine married to the hand-off, in one process over plain TCP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.engine_run.tiny_models import folder_of

from tandem.decode.connector import DecodeConnector
from tandem.decode.role import DecodeRole
from tandem.engine.config import EngineConfig
from tandem.engine.core.engine_core import EngineCore
from tandem.engine.executor.base import Capacity
from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.engine.scheduler.connector import KVConnector
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.service.consumer import HandoffConsumer
from tandem.kvtransfer.service.producer import HandoffProducer
from tandem.prefill.config import PrefillConfig, chunked
from tandem.prefill.connector import PrefillConnector
from tandem.prefill.role import PrefillRole
from tandem.protocol.errors import FailCause, InvalidParameter, Refusal, RefusalCode
from tandem.protocol.ids import Incarnation, RequestKey, new_incarnation
from tandem.protocol.outputs import EngineCoreOutput, Failed
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce
from tandem.protocol.sampling import SamplingParams

ROUTER = new_incarnation()
PROMPT = tuple(3 + (7 * index) % 300 for index in range(75))
SECONDS = 20.0


class Half:
    """One engine and what it said."""

    def __init__(self, connect: Callable[[EngineConfig, UniProcExecutor], KVConnector]) -> None:
        flat: dict[str, Any] = {
            "num_gpu_blocks_override": 24,
            "max_num_batched_tokens": 32,
            "revision": "tiny",
        }
        config = EngineConfig.of(str(folder_of("llama")), dtype="float32", device="cpu", **flat)
        executor = UniProcExecutor()

        def made(capacity: Capacity) -> KVConnector:
            return connect(config, executor)

        self.core = EngineCore.launch(config, executor, connect=made)
        self.outputs: list[EngineCoreOutput] = []
        self.failed: list[Failed] = []

    def step(self) -> None:
        """One turn of the loop."""
        for _, outputs, failed in self.core.step().by_router():
            self.outputs += outputs
            self.failed += failed

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        """What it said of one choice."""
        mine = [each for each in self.outputs if (each.request, each.choice) == (name, choice)]
        return [token for each in mine for token in each.token_ids]

    def finished(self, name: str, choice: int = 0) -> bool:
        """Whether the choice has ended."""
        return any(
            each.finish for each in self.outputs if (each.request, each.choice) == (name, choice)
        )

    @property
    def free(self) -> bool:
        """Whether nothing is held."""
        stats = self.core.stats()
        return stats["free_blocks"] == stats["total_blocks"] and not self.core.has_work


class Pair:
    """P and D, linked."""

    def __init__(self, **settings: object) -> None:
        self.kv = KVTransferConfig(kv_connector="tcp", kv_control_port=0, **settings)  # type: ignore[arg-type]
        self.p_id, self.d_id = new_incarnation(), new_incarnation()
        self.prefill = Half(self._producer)
        self.decode = Half(self._consumer)
        self.p_role, self.d_role = PrefillRole(self.producer), DecodeRole(self.consumer)
        self.d_role.set_peers({self.producer.control: self.p_id})
        self.until(lambda: self.consumer.peer_up(self.p_id))
        self.until(lambda: self.d_id in self.producer.consumers())

    def _producer(self, config: EngineConfig, executor: UniProcExecutor) -> KVConnector:
        self.producer = HandoffProducer(self.kv, **self._parts(config, executor, self.p_id))  # type: ignore[arg-type]
        self.producer.start()
        return PrefillConnector(self.producer, config.cache.block_size)

    def _consumer(self, config: EngineConfig, executor: UniProcExecutor) -> KVConnector:
        self.consumer = HandoffConsumer(self.kv, **self._parts(config, executor, self.d_id))  # type: ignore[arg-type]
        self.consumer.start()
        return DecodeConnector(self.consumer)

    def _parts(
        self, config: EngineConfig, executor: UniProcExecutor, me: Incarnation
    ) -> dict[str, object]:
        return {
            "slab": executor.worker.slab_blocks(),
            "layout": config.layout,
            "num_blocks": 24,
            "fingerprint": config.fingerprint(),
            "incarnation": me,
            "registry": CollectorRegistry(),
            "notify": lambda: None,
        }

    def until(self, check: Callable[[], bool]) -> None:
        """Step both until ``check`` holds."""
        deadline = time.monotonic() + SECONDS
        while not check():
            self.prefill.step()
            self.decode.step()
            assert time.monotonic() < deadline, (self.prefill.failed, self.decode.failed)
            time.sleep(0.001)

    def ask(self, name: str, prompt: Sequence[int] = PROMPT, **params: object) -> RequestKey:
        """Both legs of one request."""
        key = RequestKey(ROUTER, name, 0)
        fields = {"temperature": 0.0, "seed": 1, "max_tokens": 10} | params
        request = {
            "key": key,
            "prompt_token_ids": list(prompt),
            "params": SamplingParams(**fields),  # type: ignore[arg-type]
            "budget_ms": 15_000,
        }
        refused = self.decode.core.add(EngineCoreRequest(**request, kv=Consume(self.p_id)))  # type: ignore[arg-type]
        assert refused is None, refused
        refused = self.prefill.core.add(EngineCoreRequest(**request, kv=Produce(self.d_id)))  # type: ignore[arg-type]
        assert refused is None, refused
        return key

    def alone(self, prompt: Sequence[int] = PROMPT, **params: object) -> list[list[int]]:
        """The same request computed whole on D, each choice."""
        fields = {"temperature": 0.0, "seed": 1, "max_tokens": 10} | params
        asked = SamplingParams(**fields)  # type: ignore[arg-type]
        key = RequestKey(ROUTER, "alone", 0)
        request = EngineCoreRequest(key=key, prompt_token_ids=list(prompt), params=asked)
        assert self.decode.core.add(request) is None
        self.until(lambda: all(self.decode.finished("alone", n) for n in range(asked.n)))
        return [self.decode.tokens("alone", n) for n in range(asked.n)]

    def close(self) -> None:
        """End threads and engines."""
        self.p_role.close()
        self.d_role.close()
        self.prefill.core.close()
        self.decode.core.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A linked pair."""
    made = Pair()
    yield made
    made.close()


def test_tokens_are_those_of_one_engine(pair: Pair) -> None:
    """P says token 1, D says it again and goes on; afterwards nothing is held."""
    pair.ask("a")
    pair.until(lambda: pair.decode.finished("a") and pair.prefill.free and pair.decode.free)

    tokens = pair.decode.tokens("a")
    assert pair.prefill.tokens("a") == tokens[:1]
    assert [tokens] == pair.alone()
    assert pair.p_role.transfer_progress() > 0
    assert pair.d_role.transfer_progress() > 0


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
    assert all(each.cause in (FailCause.GONE, FailCause.REVOKED) for each in other)


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
        assert pair.p_role.leased_blocks() == 0
    finally:
        pair.close()


def test_roles_tell_the_shell_how_they_are(pair: Pair) -> None:
    """Health of links from D, none from P; no problem on either side."""
    pair.d_role.note_progress(1, has_work=False)
    pair.p_role.note_progress(1, has_work=False)
    pair.p_role.set_peers({})

    assert [each.up for each in pair.d_role.peer_health()] == [True]
    assert pair.p_role.peer_health() == ()
    assert pair.d_role.leased_blocks() == 0
    assert pair.p_role.problem() is None
    assert pair.d_role.problem() is None


def test_chunks_are_whole_blocks() -> None:
    """The prefill worker cuts prompts at block borders, unless the user says otherwise."""
    folder = str(folder_of("llama"))
    config = EngineConfig.of(folder, device="cpu", block_size=32, revision="tiny")

    cut = chunked(config, PrefillConfig(prefill_chunk_tokens=100))
    assert cut.scheduler.long_prefill_token_threshold == 96
    mine = config.with_(long_prefill_token_threshold=50)
    assert chunked(mine, PrefillConfig()).scheduler.long_prefill_token_threshold == 50
    with pytest.raises(InvalidParameter, match="prefill_chunk_tokens"):
        PrefillConfig(prefill_chunk_tokens=4)
