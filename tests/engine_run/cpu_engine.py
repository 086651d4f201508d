"""A whole engine on the CPU for tests: requests in, tokens out, over any executor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine_core import EngineCore
from tandem.engine.executor.base import Executor
from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.protocol.embeds import PLACEHOLDER, PromptEmbeds
from tandem.protocol.ids import RequestKey
from tandem.protocol.outputs import PooledOutput
from tandem.protocol.pooling import NO_SAMPLING, PoolingParams
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

ROUTER = b"tests-of-the-cpu"
GREEDY = SamplingParams(temperature=0.0, seed=0)


class CPUEngine:
    """EngineCore over one model; keeps what it is asked to make."""

    def __init__(self, folder: Path, *, executor: Executor | None = None, **settings: Any) -> None:
        config = EngineConfig.of(folder, device="cpu", revision="test", **settings)
        self.executor = executor if executor is not None else UniProcExecutor()
        self.core = EngineCore.launch(config, self.executor)
        self._numbers = itertools.count()
        self.cached: dict[str, int] = {}
        """Prompt tokens that came from the prefix cache, by request."""
        self.pooled: dict[str, PooledOutput] = {}
        """Vectors by request."""

    def add(self, prompt: Sequence[int], count: int, params: SamplingParams = GREEDY) -> RequestKey:
        """A request for exactly ``count`` tokens; its key."""
        key = RequestKey(ROUTER, f"r{next(self._numbers)}", 0)
        asked = {f: getattr(params, f) for f in params.__struct_fields__}
        wanted = SamplingParams(**{**asked, "max_tokens": count, "ignore_eos": True})
        request = EngineCoreRequest(key=key, prompt_token_ids=list(prompt), params=wanted)
        refusal = self.core.add(request)
        assert refusal is None, refusal
        return key

    def add_embeds(
        self,
        embeds: PromptEmbeds,
        count: int,
        params: SamplingParams = GREEDY,
        emitted: tuple[tuple[int, ...], ...] = (),
    ) -> RequestKey:
        """The same for a prompt of embeddings; ``emitted`` by an earlier attempt."""
        key = RequestKey(ROUTER, f"r{next(self._numbers)}", 0)
        asked = {f: getattr(params, f) for f in params.__struct_fields__}
        request = EngineCoreRequest(
            key=key,
            prompt_token_ids=[PLACEHOLDER] * embeds.num_tokens,
            prompt_embeds=embeds,
            params=SamplingParams(**{**asked, "max_tokens": count, "ignore_eos": True}),
            emitted=emitted,
        )
        refusal = self.core.add(request)
        assert refusal is None, refusal
        return key

    def pool(self, prompt: Sequence[int], params: PoolingParams) -> RequestKey:
        """A request for a vector; its key."""
        key = RequestKey(ROUTER, f"r{next(self._numbers)}", 0)
        request = EngineCoreRequest(
            key=key, prompt_token_ids=list(prompt), params=NO_SAMPLING, pooling=params
        )
        refusal = self.core.add(request)
        assert refusal is None, refusal
        return key

    def run(self) -> dict[str, list[int]]:
        """Steps until nothing is left; tokens by request."""
        made: dict[str, list[int]] = {}
        while self.core.has_work:
            for outputs in self.core.step().outputs.values():
                for each in outputs:
                    if isinstance(each, PooledOutput):
                        self.pooled[each.request] = each
                        continue
                    if each.num_cached_tokens is not None:
                        self.cached[each.request] = each.num_cached_tokens
                    made.setdefault(each.request, []).extend(each.token_ids)
        return made

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, params: SamplingParams = GREEDY
    ) -> list[list[int]]:
        """``count`` tokens of each prompt, all in one batch as far as it goes."""
        keys = [self.add(prompt, count, params) for prompt in prompts]
        made = self.run()
        return [made[key.request] for key in keys]
