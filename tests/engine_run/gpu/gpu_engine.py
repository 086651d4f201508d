"""An engine on a GPU for tests: all prompts at once, overlapped steps, graphs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine_core import EngineCore
from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.protocol.ids import RequestKey
from tandem.protocol.outputs import EngineCoreOutput
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

ROUTER = b"tests-of-the-gpu"
GREEDY = SamplingParams(temperature=0.0, seed=0)


class GPUEngine:
    """EngineCore over one device; keeps what it is asked to make."""

    def __init__(self, folder: Path, **settings) -> None:
        self.config = EngineConfig.of(folder, device="cuda", revision="test", **settings)
        executor = UniProcExecutor()
        self.core = EngineCore(self.config, executor, executor.start(self.config))
        self.runner = executor.worker.runner
        self._numbers = itertools.count()

    def add(self, prompt: Sequence[int], count: int, params: SamplingParams = GREEDY) -> str:
        """A request for exactly ``count`` tokens; its name."""
        name = f"r{next(self._numbers)}"
        asked = {f: getattr(params, f) for f in params.__struct_fields__}
        refusal = self.core.add(
            EngineCoreRequest(
                key=RequestKey(ROUTER, name, 0),
                prompt_token_ids=list(prompt),
                params=SamplingParams(**{**asked, "max_tokens": count, "ignore_eos": True}),
            )
        )
        assert refusal is None, refusal
        return name

    def run(self) -> dict[str, list[int]]:
        """Steps until nothing is left; tokens by name."""
        made: dict[str, list[int]] = {}
        while self.core.has_work:
            for outputs in self.core.step().outputs.values():
                for each in outputs:
                    assert isinstance(each, EngineCoreOutput)
                    made.setdefault(each.request, []).extend(each.token_ids)
        return made

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, params: SamplingParams = GREEDY
    ) -> list[list[int]]:
        """``count`` tokens of each prompt, all in one batch as far as it goes."""
        names = [self.add(prompt, count, params) for prompt in prompts]
        made = self.run()
        return [made[name] for name in names]


@torch.inference_mode()
def regrets(model, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """By how much each token's logit is below the best one's, given the tokens before it."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(tokens, device=model.device).unsqueeze(1)).squeeze(1)
    best: list[float] = (logits.amax(-1) - chosen).tolist()
    return best
