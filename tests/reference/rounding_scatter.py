"""How far rounding alone moves two logits apart at one place, by transformers.

In float32, over weights rounded to bfloat16, every activation that an engine in bfloat16 rounds
(norms, q, k, v, gate, up, and what o and down read) is rounded up or down at random, so that the
mean is right. Drawn again and again, the difference of two tokens' logits scatters as it does among
engines that are right: an answer that takes the other token within that scatter parted by chance,
one far outside it is a wrong token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEEDS = 20
"""Computed at a time."""


def rounded(x: Tensor) -> Tensor:
    """x in float32, each number one of its two neighbours in bfloat16, the mean kept."""
    bits = x.contiguous().view(torch.int32)
    chance = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=x.device)
    return ((bits + chance) & ~0xFFFF).view(torch.float32)


def load(folder: Path) -> Any:
    """The model with weights rounded to bfloat16, in float32, whose activations are rounded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().eval()

    def after(_module: Any, _inputs: Any, out: Tensor) -> Tensor:
        return rounded(out)

    def before(_module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounded(inputs[0]), *inputs[1:])

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        products = (
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            mlp.gate_proj,
            mlp.up_proj,
        )
        for module in (*norms, *products):
            module.register_forward_hook(after)
        for module in (attention.o_proj, mlp.down_proj):
            module.register_forward_pre_hook(before)
    model.model.norm.register_forward_hook(after)
    return model


@torch.inference_mode()
def scatter(model: Any, context: list[int], one: int, other: int, count: int) -> Tensor:
    """Logit of ``one`` less that of ``other`` after ``context``: [count] draws, in float32."""
    device = model.device
    ids = torch.tensor([context], device=device).expand(min(SEEDS, count), -1)
    found: list[Tensor] = []
    while sum(map(len, found)) < count:
        logits = model(ids, logits_to_keep=1).logits[:, -1].float()
        found.append(logits[:, one] - logits[:, other])
    return torch.cat(found)[:count].cpu()
