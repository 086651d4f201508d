"""Products of a step by model, for tune_gemm.py: outputs, inner size and number of each."""

from __future__ import annotations

Products = dict[str, tuple[int, int, int]]


def products(
    layers: int, hidden: int, queries: int, keys: int, inter: int, vocabulary: int
) -> Products:
    """Return the products of a dense decoder. `queries` and `keys` are heads times their size, keys
    without values."""
    return {
        "qkv": (queries + 2 * keys, hidden, layers),
        "o": (hidden, queries, layers),
        "gate_up": (2 * inter, hidden, layers),
        "down": (hidden, inter, layers),
        "head": (vocabulary, hidden, 1),
    }


MODELS: dict[str, Products] = {
    "qwen3-8b": products(36, 4096, 4096, 1024, 12288, 151936),
    "llama-3.1-8b": products(32, 4096, 4096, 1024, 14336, 128256),
    "mistral-7b": products(32, 4096, 4096, 1024, 14336, 32768),
    "qwen2.5-7b": products(28, 3584, 3584, 512, 18944, 152064),
    "qwen3-14b": products(40, 5120, 5120, 1024, 17408, 151936),
    "qwen3-4b": products(36, 2560, 4096, 1024, 9728, 151936),
    "llama-3.2-3b": products(28, 3072, 3072, 1024, 8192, 128256),
    "qwen3-1.7b": products(28, 2048, 2048, 1024, 6144, 151936),
    "qwen2.5-1.5b": products(28, 1536, 1536, 256, 8960, 151936),
    "llama-3.2-1b": products(16, 2048, 2048, 512, 8192, 128256),
    "qwen3-0.6b": products(28, 1024, 2048, 1024, 3072, 151936),
    "qwen2.5-0.5b": products(24, 896, 896, 128, 4864, 151936),
}
HELD_OUT: dict[str, Products] = {
    "smollm2-135m": products(30, 576, 576, 192, 1536, 49152),
    "smollm2-360m": products(32, 960, 960, 320, 2560, 49152),
    "smollm2-1.7b": products(24, 2048, 2048, 2048, 8192, 49152),
    "qwen2.5-3b": products(36, 2048, 2048, 256, 11008, 151936),
    "qwen2.5-14b": products(48, 5120, 5120, 1024, 13824, 152064),
}
"""In no table: what the rule for other shapes is held to (`tune_gemm.py --rule`)."""
MODELS |= HELD_OUT
GATED = "gate_up"
"""What is also tried with the activation folded in."""
