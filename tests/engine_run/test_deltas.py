"""Deltas of linear layers: an adapter's term comes between the product and what follows it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine_run.run_driver import Driver
from tests.engine_run.tiny_models import folder_of
from torch import Tensor

from tandem.engine.layers.linear import Linear
from tandem.engine.loader import Weights
from tandem.engine.models import registry
from tandem.engine.quant import LinearPart, Rows
from tandem.engine.quant.dense import DenseMethod

RANK = 4
PROMPTS = [[(7 * i + length) % 300 + 5 for i in range(length)] for length in (7, 33, 70)]
TARGETS = {
    "attention out": ("o_proj",),
    "down": ("down_proj",),
    "gate and up": ("gate_proj", "up_proj"),
    "q, k and v": ("q_proj", "k_proj", "v_proj"),
}


def pair_of(name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank] of one layer of the checkpoint."""
    draw = torch.Generator().manual_seed(sum(name.encode()))
    return (
        torch.randn(RANK, shape[1], generator=draw) * 0.1,
        torch.randn(shape[0], RANK, generator=draw) * 0.1,
    )


class LoRA:
    """B(A(x)) of each part, side by side. Implements Delta."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._pairs = pairs

    def __call__(self, x: Tensor, rows: Rows | None) -> Tensor:
        assert rows is not None, "an adapter is chosen by the rows' sequences"
        return torch.cat([x @ a.T @ b.T for a, b in self._pairs], 1)


def adapting(targets: tuple[str, ...]) -> Callable[[Weights, Sequence[LinearPart]], LoRA | None]:
    """Return a ``Weights.delta`` with an adapter for layers named ``targets``."""

    def delta(source: Weights, parts: Sequence[LinearPart]) -> LoRA | None:
        if not parts[0].prefix.endswith(targets):
            return None
        return LoRA([pair_of(each.prefix, each.shape) for each in parts])

    return delta


def merged(folder: Path, targets: tuple[str, ...]) -> Path:
    """Write the model with W + B A in place of W of its layers named ``targets``."""
    source = folder_of("llama-untied-biased")
    shutil.copy(source / "config.json", folder)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in set(index["weight_map"].values()):
        tensors |= load_file(source / file)
    for name, weight in tensors.items():
        prefix = name.removesuffix(".weight")
        if prefix.endswith(targets) and weight.ndim == 2:
            a, b = pair_of(prefix, (weight.shape[0], weight.shape[1]))
            tensors[name] = weight + b @ a
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def generated(folder: Path) -> tuple[list[list[int]], Tensor]:
    """Tokens of mixed steps, and the logits of all."""
    driver = Driver(folder)
    seqs = [driver.add(each) for each in PROMPTS]
    return driver.generate(seqs, 6, budget=23), torch.cat(driver.ear.heard)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_a_delta_equals_merged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: tuple[str, ...], dense: bool
) -> None:
    if dense:
        monkeypatch.setattr(registry, "select_method", lambda *_: DenseMethod())
    source = folder_of("llama-untied-biased")
    want, scores = generated(merged(tmp_path, targets))
    plain = generated(source)[0]
    monkeypatch.setattr(Weights, "delta", adapting(targets))
    got, ours = generated(source)
    assert got == want != plain
    torch.testing.assert_close(ours, scores, atol=2e-4, rtol=2e-4)


def test_deltas_of_ranks_are_partial_sums() -> None:
    """Ranks that have parts of the inputs add B(A(x)) of their parts before the sum."""
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 32, generator=draw), torch.randn(5, 32, generator=draw)
    a, b = pair_of("whole", (24, 32))
    rows: Rows = object()  # type: ignore[assignment]
    want = x @ (weight + b @ a).T
    found = torch.zeros(5, 24)
    for part in (slice(16), slice(16, None)):
        product = DenseMethod().hold(weight[:, part], None)
        layer = Linear(product, delta=LoRA([(a[:, part], b)]))
        found = layer.add_to(found, x[:, part], rows)
    torch.testing.assert_close(found, want)
