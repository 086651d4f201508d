"""CUDA graphs of the work after a step of decodes: head, choice, and the rows' last tokens.

There is one for each class of decode batches and kind of sampling, launched after the step's own
graph, and one more with grammars' bounds (``sample.bounds``). Without them, eleven launches with
their checks take the host longer than the rest of a step of 256 rows that sample under filters. The
sampler runs without a graph if rows sample in different ways, or one requests more (rules,
log-probabilities, several choices).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from tandem.engine.sample import SamplingKind
from tandem.engine.sample.bounds import Bounds, BoundsStage
from tandem.engine.worker.capturing import Captured, captures
from tandem.engine.worker.graphs import StepGraphs
from tandem.engine.worker.inputs import StepStager
from tandem.engine.worker.staging import StepShape

Choose = Callable[[StepShape, SamplingKind, Tensor, Bounds | None], Tensor]
"""Function that samples tokens [decodes] from a class's hidden states, within bounds if given."""


class ChoiceGraphs:
    """The captured choices; none before ``capture``."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[StepShape, SamplingKind, bool], Captured] = {}

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._graphs)

    def has(self, shape: StepShape) -> bool:
        """Return whether steps of this class have their choices captured."""
        return (shape, SamplingKind.GREEDY, False) in self._graphs

    def replay(self, shape: StepShape, kind: SamplingKind, *, bounded: bool) -> Tensor:
        """Sample after the last replay of the step's graph: int64 [decodes], valid until the next
        replay of the same. Parameters are read at the addresses of ``SamplingBatch.drawing_on``,
        bounds at those of ``BoundsStage.put``."""
        return self._graphs[shape, kind, bounded].replay()

    def capture(
        self, steps: StepGraphs, stager: StepStager, choose: Choose, bounds: BoundsStage
    ) -> None:
        """Capture ``choose`` for each class of decodes of ``steps``, in the same memory: logits of
        the largest class, and their filtered copies. Called once, before any step."""
        assert steps.capturing is not None, "steps are captured before their choices"
        with captures("choices", self._graphs, stager.device):
            for shape, hidden in steps.decodes():
                stager.stage_nothing(shape)
                for kind in reversed(SamplingKind):
                    for within in (bounds.all_of(shape.decodes), None):
                        run = partial(choose, shape, kind, hidden, within)
                        captured = steps.capturing.capture(run)
                        self._graphs[shape, kind, within is not None] = captured
