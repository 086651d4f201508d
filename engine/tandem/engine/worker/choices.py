"""CUDA graphs of what comes behind a step of decodes: head, choice, and the tokens kept as their
rows' last ones.

One for each class of decode batches and kind of draw, launched behind the step's own graph, and one
more where grammars bound the draws (``sample.bounds``): eleven launches with their checks take the
host longer than all else of a step of 256 rows that draw under filters. Where rows draw in
different ways, or one asks for more (rules, log-probabilities, several choices), the sampler runs
as it is.
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
"""Tokens [decodes] drawn from a class's hidden states, within bounds if there are any."""


class ChoiceGraphs:
    """The captured choices; without ``capture`` there are none."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[StepShape, SamplingKind, bool], Captured] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._graphs)

    def has(self, shape: StepShape) -> bool:
        """Whether steps of this class have their choices captured."""
        return (shape, SamplingKind.GREEDY, False) in self._graphs

    def replay(self, shape: StepShape, kind: SamplingKind, *, bounded: bool) -> Tensor:
        """Draw behind the last replay of the step's graph: int64 [decodes], valid until the next
        replay of the same. Parameters are read where ``SamplingBatch.drawing_on`` put them, and
        bounds where ``BoundsStage.put`` did."""
        return self._graphs[shape, kind, bounded].replay()

    def capture(
        self, steps: StepGraphs, stager: StepStager, choose: Choose, bounds: BoundsStage
    ) -> None:
        """Capture ``choose`` for each class of decodes that ``steps`` holds, in the same memory:
        logits of the largest class, and what filters leave of them. Called once, before any step.
        """
        assert steps.capturing is not None, "steps are captured before their choices"
        with captures("choices", self._graphs, stager.device):
            for shape, hidden in steps.decodes():
                stager.stage_nothing(shape)
                for kind in reversed(SamplingKind):
                    for within in (bounds.all_of(shape.decodes), None):
                        run = partial(choose, shape, kind, hidden, within)
                        captured = steps.capturing.capture(run)
                        self._graphs[shape, kind, within is not None] = captured
