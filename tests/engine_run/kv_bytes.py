"""Bytes of KV that one decoding request holds, by kind of layers.

python -m tests.engine_run.kv_bytes prints the table of Gemma 3 270M in docs/performance.md.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine_plan.builders import Harness, request_of

from tandem.engine.cache.groups import NO_BLOCK
from tandem.engine.config import ModelFacts, read_facts
from tandem.protocol.card import KVKind

LENGTHS = (1024, 8192, 32768)
CHUNK = 2048
GEMMA3_270M = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "max_position_embeddings": 65536,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "full_attention_interval": 4,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 65536,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "vocab_size": 248320,
}
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}


class Held(NamedTuple):
    """Blocks of one request, in the order of the layout's groups."""

    kinds: tuple[KVKind, ...]
    blocks: tuple[int, ...]
    block_bytes: int

    def bytes_of(self, kind: KVKind) -> int:
        pairs = zip(self.kinds, self.blocks, strict=True)
        return self.block_bytes * sum(count for each, count in pairs if each is kind)


def facts(config: dict[str, Any]) -> ModelFacts:
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(config))
        return read_facts(Path(place))


def held(num_tokens: int, config: dict[str, Any] = GEMMA3_270M) -> Held:
    """Compute a prompt in chunks and one decode; return what the request then holds."""
    harness = Harness(
        num_blocks=20_000,
        facts=facts(config),
        dtype="bfloat16",
        max_num_batched_tokens=CHUNK,
        max_model_len=LENGTHS[-1] + 16,
    )
    prompt = [3 + index % 50 for index in range(num_tokens)]
    assert harness.add(request_of("a", prompt)) is None
    while len(harness.outputs) < 2:
        harness.step()
    (request,) = harness.core.scheduler.request_table.running
    tables = request.block_tables
    layout = harness.config.layout
    blocks = tuple(sum(block != NO_BLOCK for block in table) for table in tables)
    assert sum(blocks) == harness.core.manager.pool.num_blocks - harness.core.manager.num_free
    return Held(tuple(group.kind for group in layout.groups), blocks, layout.block_bytes)


def table() -> str:
    """Return the table in Markdown, in MiB."""
    lines = [
        "| tokens | full attention | windows | together | without windows |",
        "|---|---|---|---|---|",
    ]
    for length in LENGTHS:
        found = held(length)
        full, windows = found.bytes_of(KVKind.FULL), found.bytes_of(KVKind.WINDOW)
        plain = full * len(found.kinds)
        cells = (full, windows, full + windows, plain)
        lines.append(f"| {length:,} | " + " | ".join(f"{c / 2**20:.1f}" for c in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
