"""A prompt is cut for the link that its KV goes by: two engines over a line that is slowed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from reference import rows
from tests.engine_run.encoder_models import encoder_of
from tests.engine_run.tiny_models import folder_of
from tests.waiting import wait_for
from tests.workers.pair import Pair
from tests.workers.slow_line import ADVERTISED, SlowLine

from tandem.cli.ports import free_ports
from tandem.engine.config import EngineConfig
from tandem.engine.core.engine_core import EngineCore
from tandem.engine.executor.base import Executor
from tandem.engine.kv_memory import Capacity
from tandem.engine.scheduler.connector import KVConnector
from tandem.kvtransfer.config import KVTransferConfig
from tandem.prefill import worker as prefill_worker
from tandem.prefill.config import CUT_BY_HAND, PrefillConfig, cuts_for_links
from tandem.prefill.connector import PrefillConnector
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.ids import new_incarnation
from tandem.worker.launch import RoleContext, RoleParts
from tandem.worker.server_config import ServerConfig

pytestmark = pytest.mark.timeout(400)  # on a machine where a prompt takes seconds
FAST = 1e12
"""Bytes a second: nothing is held up."""
SLOWEST, SLOW = 3e6, 8e6
"""By the slower of them KV still comes within a request's time."""
TIMES_AS_LONG = 2.5
"""As its prompt is computed, on the machine as it is, KV takes by a slow line."""
USUAL = 400
"""Tokens of a usual chunk."""
WARM, JUDGED = (26, 27), range(28, 35)
"""Rows of the reference; their prompts have 139 to 270 tokens."""


def drawn(number: int) -> list[int]:
    """A prompt that nobody has cached, and for which there is no reference."""
    return [1000 + (31 * index + 97 * number) % 9000 for index in range(200)]


class LinkedPair(Pair):
    """P and D on a line of their own, P's prompts cut for it."""

    seconds = 60.0

    def __init__(self, folder: Path, *, cuts_for_links: bool = True) -> None:
        control, data = free_ports(2)
        self._cuts_for_links, self._asked = cuts_for_links, 0
        self._usual = 0.0
        self.line = SlowLine(control, data, FAST)
        engine = {
            "folder": folder,
            "num_gpu_blocks_override": 80,
            "max_num_batched_tokens": 512,
            "long_prefill_token_threshold": USUAL,
        }
        ports: dict[str, Any] = {"kv_control_port": control, "kv_data_port": data}
        super().__init__("tcp", engine=engine, kv_advertise_host=ADVERTISED, **ports)

    def _producer(self, config: EngineConfig, executor: Executor) -> KVConnector:
        super()._producer(config, executor)
        return PrefillConnector(
            self.producer, config.cache.block_size, cuts_for_links=self._cuts_for_links
        )

    def slow_down(self) -> None:
        """The line takes longer than a prompt, by what the last one on a fast line took."""
        self.line.bytes_per_s = min(SLOW, max(SLOWEST, self._usual / TIMES_AS_LONG))

    def chunks(self, prompt: Sequence[int]) -> tuple[int, list[int]]:
        """The steps in which P computed a prompt, and the tokens that D said."""
        self._asked += 1
        name, before = f"r{self._asked}", self._counted()
        began, passed = time.monotonic(), self.line.passed
        self.ask(name, prompt, budget_ms=60_000, max_tokens=4)
        self.until(lambda: self._counted() > before)
        computed = time.monotonic() - began
        self.until(lambda: self.decode.finished(name) and self.prefill.free)
        if self.line.bytes_per_s == FAST:
            self._usual = (self.line.passed - passed) / computed
        return self._counted() - before, self.decode.tokens(name)

    def _counted(self) -> int:
        samples = next(iter(self.producer._metrics.chunks.collect())).samples
        return round(sum(each.value for each in samples if each.name.endswith("_sum")))

    def close(self) -> None:
        """End the line, too."""
        super().close()
        self.line.close()


@pytest.fixture(scope="module")
def pair(smollm2: Path) -> Iterator[LinkedPair]:
    """With steps and a fast line that are known."""
    made = LinkedPair(smollm2)
    for index in WARM:
        assert made.chunks(rows()[index].prompt)[0] == 1
    yield made
    made.close()


@pytest.mark.full
def test_a_slow_line_makes_more_chunks_and_the_same_tokens(pair: LinkedPair) -> None:
    """P measures the line by what D takes; nothing else tells it. Once the line is quick again,
    prompts are cut as before."""
    pair.slow_down()
    counts: list[int] = []
    for index in JUDGED:
        count, tokens = pair.chunks(rows()[index].prompt)
        counts.append(count)
        assert rows()[index].cut(4).verdict(tokens) in ("equal", "excused")
        if min(counts[-2:]) > 1 and len(counts) > 1:
            break
    assert min(counts[-2:]) > 1, counts

    pair.line.bytes_per_s = FAST
    counts = []
    while counts[-2:] != [1, 1] and len(counts) < 12:
        counts.append(pair.chunks(drawn(len(counts)))[0])
    assert counts[-2:] == [1, 1]


@pytest.mark.full
def test_a_hand_off_that_is_given_up_ends_its_stretch(pair: LinkedPair) -> None:
    """D has not taken all parts and never will: the time until the next hand-off is nobody's."""
    takes = pair.producer._mover.takes
    pair.slow_down()
    key = pair.ask("dropped", drawn(99), max_tokens=4)
    pair.until(lambda: bool(takes._busy))
    pair.decode.core.abort(key)
    pair.prefill.core.abort(key)
    pair.until(lambda: pair.prefill.free and pair.decode.free and not takes._busy)


@pytest.mark.full
def test_who_does_not_want_it_has_prompts_cut_as_usual(smollm2: Path) -> None:
    """Whatever the line takes. What was measured of a link is forgotten with it."""
    pair = LinkedPair(smollm2, cuts_for_links=False)
    try:
        assert pair.chunks(drawn(9))[0] == 1
        pair.slow_down()
        assert [pair.chunks(drawn(number))[0] for number in range(2)] == [1, 1]
        assert pair.producer.link_times(pair.d_id) is not None
        pair.consumer.close()
        wait_for(lambda: pair.producer.link_times(pair.d_id) is None)
    finally:
        pair.close()


def test_who_says_how_prompts_are_cut_has_them_cut_for_no_link() -> None:
    """Both at once are refused by name, and so it is for an encoder, which hands nothing over."""
    wanted = PrefillConfig(prefill_chunks_by_link=True)
    config = tiny(folder_of("llama"))
    assert cuts_for_links(config, wanted)
    assert not cuts_for_links(config, PrefillConfig())
    with pytest.raises(InvalidParameter, match="false beside prefill_chunk_tokens"):
        cuts_for_links(config, replace(wanted, prefill_chunk_tokens=64))
    for name in CUT_BY_HAND:
        with pytest.raises(InvalidParameter, match=f"prefill_chunks_by_link.*false beside {name}"):
            cuts_for_links(config.with_(**{name: 64}), wanted)
    with pytest.raises(InvalidParameter, match=r"prefill_chunks_by_link.*an encoder"):
        cuts_for_links(tiny(encoder_of("bert")[0]), wanted)
    with pytest.raises(InvalidParameter, match=r"prefill_chunks_by_link.*true or false"):
        PrefillConfig(prefill_chunks_by_link=2)  # type: ignore[arg-type]


def tiny(folder: Path) -> EngineConfig:
    """Of a model of random weights."""
    return EngineConfig.of(str(folder), device="cpu", revision="tiny", num_gpu_blocks_override=24)


@pytest.mark.parametrize(
    ("wanted", "pull_peers", "cuts"), [(True, 0, True), (True, 2, True), (False, 0, False)]
)
def test_the_worker_tells_its_connector(
    wanted: bool, pull_peers: int, cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that serves goes by what the user gave, not by the chunks that follow from it,
    whether it pulls prefixes or not."""
    told: list[bool] = []

    class Noted(PrefillConnector):
        def __init__(self, *args: Any, cuts_for_links: bool = False, **fields: Any) -> None:
            told.append(cuts_for_links)
            super().__init__(*args, cuts_for_links=cuts_for_links, **fields)

    monkeypatch.setattr(prefill_worker, "PrefillConnector", Noted)
    monkeypatch.setattr(prefill_worker, "run_worker", launched)
    kv = KVTransferConfig(kv_connector="tcp", kv_control_port=0, kv_pull_peers=pull_peers)
    prefill = PrefillConfig(prefill_chunks_by_link=wanted)
    prefill_worker.run(tiny(folder_of("llama")), ServerConfig(), kv, prefill)
    assert told == [cuts]


def launched(config: EngineConfig, *_: object, executor: Any, make_role: Any, allocate: Any) -> int:
    """As ``run_worker``, without a process around it."""
    handoffs: list[Any] = []

    def connect(capacity: Capacity) -> KVConnector | None:
        fingerprint, me = config.fingerprint(capacity.layout), new_incarnation()
        registry = CollectorRegistry()
        context = RoleContext(
            config, capacity, fingerprint, me, executor, registry, None, lambda: None
        )
        parts: RoleParts = make_role(context)
        handoffs.append(parts.handoff)
        return parts.connector

    core = EngineCore.launch(config, executor, connect=connect, allocate=allocate)
    handoffs[0].close()
    core.close()
    return 0
