"""Builders for the plan half's tests: small models, requests, and engines over ``SimExecutor``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.engine_plan.sim import SimExecutor

from tandem.engine.config import EngineConfig, ModelFacts
from tandem.engine.config.facts import LinearAttentionFacts
from tandem.engine.core.engine_core import EngineCore, StepOutputs
from tandem.engine.kv_memory import StepSize
from tandem.engine.scheduler.admission import end_of
from tandem.protocol.card import KVKind
from tandem.protocol.errors import RefusalCode
from tandem.protocol.ids import RequestKey
from tandem.protocol.outputs import EngineCoreOutput, Failed, PooledOutput, Refused
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

ROUTER = b"r" * 16
VOCAB = 50
EOS = (7,)

FACTS = ModelFacts(
    architecture="LlamaForCausalLM",
    num_layers=1,
    hidden_size=8,
    intermediate_size=16,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=VOCAB,
    max_position_embeddings=4096,
)
_FULL, _WINDOW, _STATE = KVKind.FULL, KVKind.WINDOW, KVKind.STATE
_DELTA = LinearAttentionFacts(
    num_key_heads=1, key_head_dim=2, num_value_heads=1, value_head_dim=2, conv_kernel=2
)
LAYERS: dict[str, tuple[KVKind, ...]] = {
    "full": (_FULL,),
    "window": (_WINDOW,),
    "mixed": (_FULL, _WINDOW, _WINDOW),
    "hybrid": (_STATE, _STATE, _FULL),
    "all": (_STATE, _WINDOW, _FULL),
}
"""Kinds of the layers of models without weights."""


def facts_of_layers(name: str, window: int = 20) -> ModelFacts:
    """A model of one of ``LAYERS``."""
    kinds = LAYERS[name]
    return replace(
        FACTS,
        num_layers=len(kinds),
        layer_kinds=kinds,
        sliding_window=window if _WINDOW in kinds else None,
        linear=_DELTA if _STATE in kinds else None,
    )


STEP_SECONDS = 0.01
"""What a step takes by the clock of its engine."""
REST_SECONDS = 0.001


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def config_of(**flat: Any) -> EngineConfig:
    """Settings of a small engine without files."""
    settings: dict[str, Any] = {"revision": "test", "watermark": 0.0, "max_num_batched_tokens": 64}
    settings |= flat
    return EngineConfig.of("sim", **{"facts": FACTS, "device": "cpu", **settings})


def params_of(**fields: Any) -> SamplingParams:
    """Greedy parameters with a seed, unless said otherwise."""
    return SamplingParams(**({"temperature": 0.0, "seed": 1, "max_tokens": 8} | fields))


def request_of(
    name: str,
    prompt: Sequence[int] | int = 20,
    *,
    router: bytes = ROUTER,
    attempt: int = 0,
    params: SamplingParams | None = None,
    **fields: Any,
) -> EngineCoreRequest:
    """A request; an integer prompt is that many tokens that depend on the name."""
    if isinstance(prompt, int):
        prompt = [(ord(name[-1]) * 31 + index * 17) % VOCAB for index in range(prompt)]
    return EngineCoreRequest(
        key=RequestKey(router, name, attempt),
        prompt_token_ids=list(prompt),
        params=params if params is not None else params_of(),
        eos_token_ids=EOS,
        **fields,
    )


class Harness:
    """An EngineCore over a verifying SimExecutor, with everything it said."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        connector: Any = None,
        num_cpu_blocks: int = 0,
        metrics: Any = None,
        gate: Any = None,
        step_sizes: Sequence[StepSize] = (),
        **flat: Any,
    ) -> None:
        """``gate`` makes the only one; None is the usual ones. ``step_sizes``: what the executor
        says that it pads steps to."""
        self.config = config_of(**flat)
        self.clock = Clock()
        self.executor = SimExecutor(num_blocks, verify=True, num_cpu_blocks=num_cpu_blocks)
        self.core = EngineCore(
            self.config,
            self.executor,
            replace(self.executor.start(self.config), step_sizes=tuple(step_sizes)),
            connector=connector,
            metrics=metrics,
            gates=None if gate is None else [gate()],
            clock=self.clock,
        )
        self.requests: dict[RequestKey, EngineCoreRequest] = {}
        self.outputs: list[EngineCoreOutput] = []
        self.pooled: list[PooledOutput] = []
        self.failed: list[Failed] = []
        self.refused: list[Refused] = []
        self.stored: set[bytes] = set()
        """Hashes that a router would believe to be cached."""

    def add(self, request: EngineCoreRequest) -> RefusalCode | None:
        refusal = self.core.add(request)
        if refusal is None:
            self.requests[request.key] = request
        return None if refusal is None else refusal.code

    def step(self) -> StepOutputs:
        result = self.core.step()
        for _, outputs, failed in result.by_router():
            self.outputs += [each for each in outputs if isinstance(each, EngineCoreOutput)]
            self.pooled += [each for each in outputs if isinstance(each, PooledOutput)]
            self.failed += failed
        self.refused += [each for told in result.refused.values() for each in told]
        if result.blocks is not None:
            if result.blocks.cleared:
                self.stored.clear()
            self.stored -= set(result.blocks.removed)
            self.stored |= set(result.blocks.stored)
        self.clock.now += STEP_SECONDS
        return result

    def rest(self) -> None:
        """Give threads time behind a step in vain. It counts as the machine's clock has it: what a
        thread has ten seconds for is not over by a second of such steps."""
        time.sleep(REST_SECONDS)
        self.clock.now -= STEP_SECONDS - REST_SECONDS

    def run(self, limit: int = 2000) -> None:
        """Steps until nothing is left; each must get on."""
        for _ in range(limit):
            if not self.core.has_work:
                return
            assert self.step().progressed or not self.core.has_work, "nothing moves"
        raise AssertionError(f"not done after {limit} steps: {self.core.stats()}")

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        """Tokens of one choice, in order; positions must have no gaps and no repeats."""
        found: list[int] = []
        start: int | None = None
        for output in self.outputs:
            if output.request == name and output.choice == choice:
                start = output.position if start is None else start
                assert output.position == start + len(found), "a gap or a repeat"
                found += output.token_ids
        return found

    def finish(self, name: str, choice: int = 0) -> str | None:
        """How one choice ended: said exactly once, with its last output."""
        mine = [out for out in self.outputs if (out.request, out.choice) == (name, choice)]
        assert all(output.finish is None for output in mine[:-1])
        return mine[-1].finish if mine else None

    def oracle(self, request: EngineCoreRequest, choice: int = 0) -> tuple[list[int], str]:
        """What one choice emits when it is computed alone, after its forced tokens."""
        forced = request.emitted_of(choice)
        tokens, finish = self.executor.model.generate(
            request.prompt_token_ids,
            request.params,
            choice=choice,
            eos=request.eos_token_ids,
            max_model_len=end_of(request, self.core.max_model_len),
            forced=forced,
        )
        return tokens[len(forced) :], finish.reason

    def check_pooled(self, request: EngineCoreRequest) -> None:
        """One vector, that of the prompt computed alone, and no token."""
        assert request.pooling is not None
        name, model = request.key.request, self.executor.model
        states: list[int] = []
        for token in request.prompt_token_ids:
            states.append(model.write(states[-1] if states else None, token))
        (output,) = [each for each in self.pooled if each.request == name]
        assert output.vector == [model.pooled(request.pooling, 0.0, states)]
        assert output.num_prompt_tokens == len(states)
        assert name not in {each.request for each in self.outputs}

    def check(self, request: EngineCoreRequest) -> None:
        """Every open choice gave exactly the oracle's tokens and ended as it did."""
        for choice in range(request.params.n):
            if choice not in request.finished_choices:
                name = request.key.request
                expected, reason = self.oracle(request, choice)
                assert self.tokens(name, choice) == expected
                assert self.finish(name, choice) == reason

    def check_empty(self) -> None:
        """Nothing is held, and the engine's view of its cache is the router's."""
        stats = self.core.stats()
        self.core.check_integrity()
        copying = self.core.manager.num_copying
        assert stats["free_blocks"] + copying == stats["total_blocks"]
        assert set(self.core.cached_blocks().stored) == self.stored
