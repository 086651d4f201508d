"""Choice of the source of drafts by the settings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tandem.engine.config import EngineConfig
from tandem.engine.config.speculative import NgramLookup
from tandem.engine.worker.drafts import Drawn, Proposer
from tandem.kernels.drafts import TokenHistory, lookup


@dataclass(frozen=True)
class NgramProposer:
    """Prompt lookup."""

    lookup: NgramLookup

    def propose(self, history: TokenHistory, rows: Tensor, results: Tensor, drawn: Drawn) -> None:
        least, most = self.lookup.prompt_lookup_min, self.lookup.prompt_lookup_max
        lookup(history, rows, least, most, results[2])


def proposer_of(config: EngineConfig) -> Proposer | None:
    """Return the configured proposer; None: no drafts are proposed. Raises a LoadError."""
    source = config.scheduler.lookup
    return None if source is None else NgramProposer(source)
