"""An engine to measure: Qwen3-8B's shapes with dummy weights, driven in this process, no HTTP."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.config import EngineConfig
from tandem.engine.config.read import facts_of
from tandem.engine.core.engine_core import EngineCore, StepOutputs
from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.engine.worker import device_events
from tandem.protocol.ids import RequestKey
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
}
QWEN25_7B: dict[str, Any] = {
    **QWEN3_8B,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN3_06B: dict[str, Any] = {
    **QWEN3_8B,
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
DUMMY = "qwen3-8b"
DUMMIES = {
    DUMMY: QWEN3_8B,
    "qwen3-8b-fp8": {**QWEN3_8B, "quantization_config": FP8},
    "qwen2.5-7b": QWEN25_7B,
    "qwen3-0.6b": QWEN3_06B,
}
"""Not folders: the shapes above by name, with weights that no file holds."""
ROUTER = b"bench-engine-000"
GREEDY = SamplingParams(temperature=0.0, seed=0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1)


def facts(layers: int | None = None, model: str = DUMMY) -> Any:
    """One of ``DUMMIES``, or its first layers."""
    config = DUMMIES[model]
    return facts_of(config if layers is None else {**config, "num_hidden_layers": layers})


@dataclass
class Rig:
    """One engine and what its steps cost."""

    core: EngineCore
    waited: list[float] = field(default_factory=lambda: [0.0])
    """Seconds spent waiting for the device."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds in parts of the host's work, once ``time_parts`` was called."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _random: random.Random = field(default_factory=lambda: random.Random(7))

    @classmethod
    def start(cls, folder: str = DUMMY, *, layers: int | None = None, **flat: Any) -> Rig:
        """An engine that has started; ``flat`` are settings."""
        kind = "dummy" if folder in DUMMIES else "auto"
        settings = {"load_format": kind, "enable_prefix_caching": False, **flat}
        if settings["load_format"] == "dummy":
            settings["facts"] = facts(layers, folder if folder in DUMMIES else DUMMY)
        config = EngineConfig.of(folder, device="cuda", revision="bench", **settings)
        executor = UniProcExecutor()
        rig = cls(EngineCore(config, executor, executor.start(config)))
        rig._watch()
        return rig

    def time_parts(self) -> None:
        """Time the parts of the host's work from now on."""
        scheduler, runner = self.core.scheduler, self.core._executor.worker.runner  # type: ignore[attr-defined]
        for owner, name in (
            (scheduler, "plan"),
            (scheduler, "update_from_output"),
            (runner.stager, "stage"),
            (runner.graphs, "replay"),
            (runner.sampler, "sample"),
            (runner.model.head, "__call__"),
            (self.core._executor, "execute"),
        ):
            self._time(owner, name)

    def _time(self, owner: Any, name: str) -> None:
        if name == "__call__":
            owner, name = type(owner), "__call__"
        plain, parts = getattr(owner, name), self.parts
        label = f"{type(owner).__name__ if name != '__call__' else owner.__name__}.{name}"

        def timed(*args: Any, **named: Any) -> Any:
            before = time.perf_counter()
            try:
                return plain(*args, **named)
            finally:
                parts[label] = parts.get(label, 0.0) + time.perf_counter() - before

        setattr(owner, name, timed)

    def _watch(self) -> None:
        """Count the seconds in waits for the device."""
        plain, waited = device_events.OnStream.wait, self.waited

        def wait(
            moment: device_events.OnStream, seconds: float = device_events.WAIT_SECONDS
        ) -> None:
            before = time.perf_counter()
            plain(moment, seconds)
            waited[0] += time.perf_counter() - before

        device_events.OnStream.wait = wait  # type: ignore[method-assign]

    def add(self, length: int, tokens: int, params: SamplingParams = GREEDY) -> RequestKey:
        """A random prompt that draws ``tokens`` tokens, whatever they are."""
        key = RequestKey(ROUTER, f"r{next(self._numbers)}", 0)
        prompt = self._random.choices(range(1000, 150_000), k=length)
        refusal = self.core.add(
            EngineCoreRequest(
                key=key,
                prompt_token_ids=prompt,
                params=SamplingParams(
                    temperature=params.temperature,
                    top_p=params.top_p,
                    top_k=params.top_k,
                    seed=next(self._numbers),
                    max_tokens=tokens,
                    ignore_eos=True,
                ),
            )
        )
        assert refusal is None, refusal
        return key

    def gather(
        self, batch: int, context: int, tokens: int, params: SamplingParams = GREEDY
    ) -> None:
        """A batch of decodes of about one context: all have drawn two tokens, none of ``tokens``.

        Prompts go in steps of the whole token budget. With the bound of mixed steps the first
        would have drawn hundreds of tokens, or have ended, before the last prompt is computed.
        """
        planner = self.core.scheduler._planner
        bound, planner._mixed = planner._mixed, lambda decodes: planner._budget
        for _ in range(batch):
            self.add(context, tokens, params)
        request_table = self.core.scheduler.request_table
        made = 0
        while len(request_table.running) < batch or any(
            r.num_generated < 2 for r in request_table.running
        ):
            made += sum(len(each) for each in self.step().outputs.values())
            assert made < batch * tokens, "they ended before the last had begun"
        planner._mixed = bound

    def step(self) -> StepOutputs:
        """One step of the engine."""
        return self.core.step()

    def drain(self) -> None:
        """Steps until nothing is left."""
        while self.core.has_work:
            self.core.step()

    def abort_all(self) -> None:
        """Drop all requests, and let what is in flight end."""
        keys = self.core.keys()
        for key in keys:
            self.core.abort(key)
        self.drain()

    @contextmanager
    def host_seconds(self) -> Iterator[list[float]]:
        """Seconds of the block that are not waits for the device, in the list once it ends."""
        result = [0.0]
        waited, started = self.waited[0], time.perf_counter()
        yield result
        result[0] = time.perf_counter() - started - (self.waited[0] - waited)
