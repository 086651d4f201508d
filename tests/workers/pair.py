"""A prefill and a decode engine married to the hand-off, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from tests.engine_run.tiny_models import folder_of
from tests.kvtransfer.memory_transport import kv_config, transports_of
from tests.waiting import wait_for

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine_core import EngineCore
from tandem.engine.executor.base import Executor
from tandem.engine.executor.factory import make_executor
from tandem.engine.kv_memory import Capacity, KVCacheAllocator
from tandem.engine.scheduler.connector import KVConnector
from tandem.kvtransfer.service.consumer import HandoffConsumer
from tandem.kvtransfer.service.producer import HandoffProducer
from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.ids import Incarnation, RequestKey, new_incarnation
from tandem.protocol.outputs import EngineCoreOutput, Failed, Refused
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce
from tandem.protocol.sampling import SamplingParams
from tandem.worker.connectors.consumer import DecodeConnector
from tandem.worker.connectors.producer import PrefillConnector
from tandem.worker.connectors.role import kv_cache_allocator

ROUTER = new_incarnation()
PROMPT = tuple(3 + (7 * index) % 300 for index in range(75))
SECONDS = 20.0


class Half:
    def __init__(
        self,
        connect: Callable[[EngineConfig, Executor], KVConnector],
        allocate: KVCacheAllocator | None = None,
        **settings: Any,
    ) -> None:
        flat: dict[str, Any] = {
            "num_gpu_blocks_override": 24,
            "max_num_batched_tokens": 32,
            "revision": "tiny",
        } | settings
        folder = flat.pop("folder", None) or folder_of("llama")
        config = EngineConfig.of(str(folder), dtype="float32", device="cpu", **flat)
        executor = make_executor(config)

        def made(capacity: Capacity) -> KVConnector:
            return connect(config, executor)

        self.core = EngineCore.launch(config, executor, connect=made, allocate=allocate)
        self.outputs: list[EngineCoreOutput] = []
        self.failed: list[Failed] = []
        self.refused: list[Refused] = []

    def step(self) -> None:
        said = self.core.step()
        for _, outputs, failed in said.by_router():
            self.outputs += [each for each in outputs if isinstance(each, EngineCoreOutput)]
            self.failed += failed
        self.refused += [each for told in said.refused.values() for each in told]

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        mine = [each for each in self.outputs if (each.request, each.choice) == (name, choice)]
        return [token for each in mine for token in each.token_ids]

    def finished(self, name: str, choice: int = 0) -> bool:
        return any(
            each.finish for each in self.outputs if (each.request, each.choice) == (name, choice)
        )

    @property
    def free(self) -> bool:
        stats = self.core.stats()
        return stats["free_blocks"] == stats["total_blocks"] and not self.core.has_work


class Pair:
    seconds = SECONDS
    """That anything may take."""

    def __init__(
        self,
        connector: str = "tcp",
        *,
        engine: dict[str, Any] | None = None,
        block_sizes: tuple[int, int] = (16, 16),
        kv_types: tuple[str, str] = ("auto", "auto"),
        **settings: object,
    ) -> None:
        """``engine``: settings of both engines, their model's ``folder`` among them; the others are
        the hand-off's. ``block_sizes`` are P's and D's, as are ``kv_types``."""
        fields: dict[str, Any] = {"kv_connector": connector, "kv_control_port": 0, **settings}
        self.kv = kv_config(**fields)
        self.p_id, self.d_id = new_incarnation(), new_incarnation()
        self.decode_stands = False
        """D's engine takes no step."""
        allocate = kv_cache_allocator(self.kv)
        own = (
            {**(engine or {}), "block_size": size, "kv_cache_dtype": kv_type}
            for size, kv_type in zip(block_sizes, kv_types, strict=True)
        )
        self.prefill = Half(self._producer, allocate, **next(own))
        self.decode = Half(self._consumer, allocate, **next(own))
        self.consumer.set_peers({self.producer.control: self.p_id})
        self.until(lambda: self.consumer.peer_up(self.p_id))
        self.until(lambda: self.d_id in self.producer.consumers())

    def _producer(self, config: EngineConfig, executor: Executor) -> KVConnector:
        self.producer = HandoffProducer(self.kv, **self._parts(config, executor, self.p_id))  # type: ignore[arg-type]
        self.producer.start()
        return PrefillConnector(self.producer, config.cache.block_size)

    def _consumer(self, config: EngineConfig, executor: Executor) -> KVConnector:
        self.consumer = HandoffConsumer(self.kv, **self._parts(config, executor, self.d_id))  # type: ignore[arg-type]
        self.consumer.start()
        return DecodeConnector(self.consumer)

    def _parts(
        self, config: EngineConfig, executor: Executor, me: Incarnation
    ) -> dict[str, object]:
        (region,) = executor.regions()
        return {
            "kv_cache": region.blocks,
            "layout": config.layout,
            "num_blocks": region.blocks.shape[0],
            "fingerprint": config.fingerprint(),
            "incarnation": me,
            "registry": CollectorRegistry(),
            "notify": lambda: None,
            "transports": transports_of(self.kv),
            "kv_scales": config.row_scales,
        }

    def until(self, check: Callable[[], bool]) -> None:
        """Step both until ``check`` holds."""

        def stepped() -> bool:
            self.prefill.step()
            if not self.decode_stands:
                self.decode.step()
            return check()

        def failed() -> object:
            return self.prefill.failed, self.decode.failed

        wait_for(stepped, self.seconds, every=0.001, seen=failed)

    def ask(
        self,
        name: str,
        prompt: Sequence[int] = PROMPT,
        emitted: Sequence[Sequence[int]] = (),
        budget_ms: int = 15_000,
        embeds: PromptEmbeds | None = None,
        **params: object,
    ) -> RequestKey:
        """Both legs of one request; ``emitted`` is what an earlier attempt said, by choice.
        ``embeds`` stand in place of ``prompt``."""
        key = RequestKey(ROUTER, name, 0)
        fields = {"temperature": 0.0, "seed": 1, "max_tokens": 10} | params
        request = {
            "key": key,
            "prompt_token_ids": list(prompt) if embeds is None else [0] * embeds.num_tokens,
            "prompt_embeds": embeds,
            "params": SamplingParams(**fields),  # type: ignore[arg-type]
            "budget_ms": budget_ms,
            "emitted": tuple(map(tuple, emitted)),
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
        self.producer.close()
        self.consumer.close()
        self.prefill.core.close()
        self.decode.core.close()
