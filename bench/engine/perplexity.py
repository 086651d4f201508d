"""Perplexity of a model by form of weights: python bench/engine/perplexity.py [--model NAME].

The text is the pages in docs/, in pieces of --piece tokens. Prints a row per form: perplexity, its
ratio to the first form, and the share of positions whose most likely token is the first form's.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from tandem.llm import LLM, SamplingParams

PAGES = Path(__file__).parents[2] / "docs"
FORMS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32, weights fp8": {"dtype": "float32", "quantization": "fp8"},
    "bfloat16, weights fp8": {"dtype": "bfloat16", "quantization": "fp8"},
}


def scores(llm: LLM, pieces: list[list[int]]) -> list[tuple[float, int]]:
    """Return the log-probability of each token of the pieces, and the most likely token there."""
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    prompts = [{"prompt_token_ids": each} for each in pieces]
    return [
        (at.sampled.logprob, at.top[0].token_id)
        for output in llm.generate(prompts, asked, use_tqdm=False)
        for at in output.prompt_logprobs or ()
        if at is not None
    ]


def main() -> None:
    """Measure every form, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--piece", type=int, default=512)
    arguments = parser.parse_args()
    text = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    first: list[tuple[float, int]] = []
    for name, settings in FORMS.items():
        with LLM(arguments.model, enable_prefix_caching=False, **settings) as llm:
            ids = llm.get_tokenizer().encode(text)[: arguments.tokens]
            size = arguments.piece
            pieces = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
            found = scores(llm, pieces)
        first = first or found
        loss = [-sum(each for each, _ in some) / len(some) for some in (found, first)]
        same = sum(a[1] == b[1] for a, b in zip(found, first, strict=True)) / len(found)
        print(
            f"| {name} | {math.exp(loss[0]):.3f} | {math.exp(loss[0] - loss[1]):.4f} | {same:.4f} |"
        )


if __name__ == "__main__":
    main()
