"""Products see whose rows they multiply: an adapter of each sequence, in one mixed step."""

import pytest
import torch
from tests.engine_run.run_driver import Driver
from tests.engine_run.tiny_models import folder_of

from tandem.engine.models import registry
from tandem.engine.quant.base import ComposedProduct, PlainMethod
from tandem.engine.quant.dense import DenseProduct

PROMPTS = [[5, 9, 200, 31, 7], list(range(20, 60)), [3, 4]]
ADAPTERS = (0.0, 0.5, -0.25)


class Adapted(ComposedProduct):
    """A product plus, for each row, its sequence's share of a low-rank one."""

    of_sequence: torch.Tensor
    """Scale by the step's sequences."""

    def __init__(self, weight, bias) -> None:
        self.plain = DenseProduct(weight, bias)
        torch.manual_seed(weight.shape[0])
        self.down = torch.randn(weight.shape[1], 2) / 8
        self.up = torch.randn(2, weight.shape[0]) / 8

    def __call__(self, x, rows=None):
        out = self.plain(x)
        if rows is None:  # the head
            return out
        assert len(rows.positions) == len(x)
        scale = self.of_sequence[rows.sequences]
        return out + scale[:, None] * (x @ self.down @ self.up)


class AdaptedMethod(PlainMethod):
    name = "adapted"

    def hold(self, weight, bias):
        return Adapted(weight, bias)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_each_sequence_gets_its_own_adapter(monkeypatch, order):
    """Decodes and chunks mixed give what each sequence gives alone; the adapters do something."""
    monkeypatch.setattr(registry, "select_method", lambda *_: AdaptedMethod())

    def steps(which):
        driver = Driver(folder_of("llama"))
        seqs = {index: driver.add(PROMPTS[index]) for index in which}
        for plan in PLANS:
            rows = [(index, count) for index, count in plan if index in seqs]
            if rows:
                Adapted.of_sequence = torch.tensor([ADAPTERS[index] for index, _ in rows])
                driver.step(*((seqs[index], count) for index, count in rows))
        return {index: driver.lines[seq].output for index, seq in seqs.items()}

    together = steps(order)
    assert together == {index: steps((index,))[index] for index in order}
    monkeypatch.setattr(registry, "select_method", lambda *_: PlainRef())
    assert steps(order) != together


class PlainRef(PlainMethod):
    name = "plain"

    def hold(self, weight, bias):
        return DenseProduct(weight, bias)


PLANS = [
    [(0, 5)],
    [(0, 1), (1, 17)],
    [(0, 1), (1, 23), (2, 2)],
    [(2, 1), (1, 1), (0, 1)],
    [(0, 1), (2, 1), (1, 1)],
]
"""(sequence, tokens) of each step, decodes first."""
