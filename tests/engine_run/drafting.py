"""A proposer for tests: right and wrong tokens of answers that are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.engine_run.cpu_engine import CPUEngine
from torch import Tensor

from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.engine.worker.drafts import Drawn
from tandem.kernels.drafts import NONE, TokenHistory


@dataclass
class Guesses:
    """Proposes what follows in ``answers``; each token whose place in the answer is a multiple of
    ``wrong_every`` is another one."""

    answers: Sequence[tuple[list[int], list[int]]]
    """(prompt, output)."""
    wrong_every: int
    num_proposed: int = 0

    def propose(self, history: TokenHistory, rows: Tensor, results: Tensor, drawn: Drawn) -> None:
        most = history.drafts.shape[1]
        for at, row in enumerate(rows.tolist()):
            tokens = history.token_ids[row, : int(history.lengths[row])].tolist()
            found = self._after(tokens, most)
            history.drafts[row] = NONE
            history.drafts[row, : len(found)] = Tensor(found).long()
            results[2, at] = len(found)
            self.num_proposed += len(found)

    def _after(self, tokens: list[int], most: int) -> list[int]:
        for prompt, output in self.answers:
            known = len(tokens) - len(prompt)
            if known >= 0 and [*prompt, *output[:known]] == tokens:
                right = enumerate(output[known : known + most], known)
                return [token + (at % self.wrong_every == 0) for at, token in right]
        return []


def guess(engine: CPUEngine, guesses: Guesses) -> None:
    """Have the engine's rank propose by ``guesses``."""
    executor = engine.executor
    assert isinstance(executor, UniProcExecutor)
    drafts = executor.worker.runner.drafts
    assert drafts is not None, "the engine has no speculative_config"
    drafts.proposer = guesses
