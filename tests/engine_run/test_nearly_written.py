"""A step with prompts notes when its last layers begin, and its KV is waited for from there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.engine_run.cpu_engine import CPUEngine

from tandem.engine.worker import runner
from tandem.engine.worker.launched import LaunchedStep
from tandem.engine.worker.step_rows import StepRows


class Counted:
    """Moments in their order; which of them were waited for."""

    def __init__(self) -> None:
        self.made = 0
        self.waited: list[int] = []


class Point:
    def __init__(self, of: Counted) -> None:
        self.number, self._of = of.made, of
        of.made += 1

    def done(self) -> bool:
        return True

    def wait(self, seconds: float = 0.0) -> None:
        self._of.waited.append(self.number)


def test_a_step_is_near_its_end_before_its_last_layers(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First, then behind its KV, then behind its draws; a step of decodes notes its end alone."""
    counted, steps = Counted(), []
    monkeypatch.setattr(runner, "moment", lambda device: Point(counted))
    finish = runner.ModelRunner._finish

    def noted(self: runner.ModelRunner, launched: LaunchedStep, computed: object) -> None:
        finish(self, launched, computed)  # type: ignore[arg-type]
        numbers = [launched.before_last_layers, launched.written, launched.moment]
        steps.append([each.number for each in numbers if isinstance(each, Point)])

    monkeypatch.setattr(runner.ModelRunner, "_finish", noted)
    engine = CPUEngine(smollm2, max_model_len=256)
    try:
        engine.generate([list(range(40, 60))], 2)
    finally:
        engine.executor.stop()
    assert steps[0] == [0, 1, 2]
    assert steps[1] == [3]


def test_what_is_near_is_waited_for_and_what_is_behind_it_is_the_fence() -> None:
    """Without such a moment the KV itself is; without that the end of the step."""
    counted = Counted()
    near, written, end = Point(counted), Point(counted), Point(counted)
    whole = LaunchedStep(1, moment=end, written=written, before_last_layers=near)
    assert whole.wait_nearly() is written
    assert LaunchedStep(1, moment=end, written=written).wait_nearly() is written
    assert LaunchedStep(1, moment=end).wait_nearly() is end
    assert counted.waited == [0, 1, 2]


@pytest.mark.parametrize(
    ("before", "tokens", "layers"),
    [(0, 1, 5), (1536, 512, 5), (7680, 512, 3), (29488, 512, 1), (0, 2048, 1), (500_000, 2048, 1)],
)
def test_how_many_layers_are_its_last_few_milliseconds(
    before: int, tokens: int, layers: int
) -> None:
    """Fewer, the more tokens a layer has to compute and the more of them they look back at."""
    index, first, counts = (np.array([each], dtype=np.int64) for each in (0, before, tokens))
    assert StepRows(index, first, counts, 0, tokens).layers_left == layers
