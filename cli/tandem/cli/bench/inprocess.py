"""Engine in this process with a timed load in tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.cli.bench.load import Ask
from tandem.engine.config import EngineConfig
from tandem.engine.core.engine_core import EngineCore
from tandem.engine.executor.factory import make_executor
from tandem.protocol.errors import InvalidParameter, TandemError
from tandem.protocol.ids import RequestKey, new_incarnation
from tandem.protocol.outputs import EngineCoreOutput
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

SECONDS = 3600.0
"""Maximum seconds of a run."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of one run, in seconds."""

    first: float
    """Until every request had its first token."""
    whole: float
    num_tokens: int


def check_fits(config: EngineConfig, tokens: int) -> None:
    """Raise InvalidParameter, before weights are loaded, for a request that does not fit."""
    if tokens > config.max_model_len:
        allowed = f"at most {config.max_model_len}, the longest that this engine takes"
        raise InvalidParameter("prompt and answer", tokens, f"{allowed}, in tokens")


class TimedEngine:
    """Engine for a load; ``close`` frees its memory."""

    def __init__(self, config: EngineConfig) -> None:
        self._core = EngineCore.launch(config, make_executor(config))
        self._me = new_incarnation()
        self._count = 0

    def run(self, load: Sequence[Ask]) -> Timed:
        """Run all requests at once, greedy, to their full length.

        Raises TandemError if one fails, or after the time limit.
        """
        started = time.perf_counter()
        for ask in load:
            self._add(ask)
        first: dict[str, float] = {}
        ended, num_tokens = 0, 0
        while ended < len(load):
            outputs = self._core.step()
            now = time.perf_counter() - started
            if outputs.failed or now > SECONDS:
                raise TandemError(f"the engine did not finish: {outputs.failed or 'too late'}")
            for output in (each for _, sent, _ in outputs.by_router() for each in sent):
                num_tokens += len(output.token_ids) if isinstance(output, EngineCoreOutput) else 0
                first.setdefault(output.request, now)
                ended += output.finish is not None
        return Timed(max(first.values()), time.perf_counter() - started, num_tokens)

    def close(self) -> None:
        self._core.close()

    def _add(self, ask: Ask) -> None:
        self._count += 1
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=ask.max_tokens, ignore_eos=True)
        request = EngineCoreRequest(
            key=RequestKey(self._me, f"b{self._count}", 0),
            prompt_token_ids=ask.prompt,
            params=params,
        )
        refusal = self._core.add(request)
        if refusal is not None:
            raise TandemError(f"the engine refused a request: {refusal.message}")
