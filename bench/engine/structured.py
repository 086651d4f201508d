"""Cost of answers under grammars: gaps between tokens, compiles, and masks.

    python bench/engine/structured.py [--rows 64 --tokens 300 --out FILE]

Qwen3-8B's shapes with dummy weights, prompts of 128 tokens, temperature 1, top-p 0.95, one engine
in this process. Rows without a grammar, all rows under one, half of them, and rows beside a grammar
that takes long (to be held against a row more without one); each row has a schema of its own. The
vocabulary is as large as the model's: a byte-level BPE that is trained here, on the sources of
Python's packages.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from rig import QWEN3_8B, ROUTER, Rig
from tokenizers import decoders, models, pre_tokenizers, trainers

from tandem.engine.structured.backends.guidance import GuidanceBackend
from tandem.engine.structured.constraint import make_mask
from tandem.protocol.ids import RequestKey
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams
from tandem.protocol.structured import StructuredOutputsParams

VOCAB = 151_643
TRAINED_ON = 60 << 20
"""Bytes of source."""
PROMPT = 128
WARM = 30
"""Tokens of each row that are not counted."""
SLOW = r"(\w+ ){0,400}\w"
"""An expression whose masks take milliseconds."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--layers", type=int, help="of the model's 36")
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder, args.vocab)
        found: dict[str, Any] = {"rows": args.rows, "alone": alone(folder, args.rows)}
        print(json.dumps(found["alone"]), flush=True)
        rig = Rig.start(
            str(folder), layers=args.layers, load_format="dummy", max_num_seqs=args.rows + 1
        )
        half = args.rows // 2
        for title, free, held, slow in (
            ("free", args.rows, 0, 0),
            ("free, a row more", args.rows + 1, 0, 0),
            ("constrained", 0, args.rows, 0),
            ("half", half, half, 0),
            ("beside a slow grammar", args.rows, 0, 1),
            ("constrained beside a slow grammar", 0, args.rows, 1),
            ("free again", args.rows, 0, 0),
        ):
            found[title] = run(rig, args.tokens, free, held, slow)
            print(title, json.dumps(found[title]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def make_folder(folder: Path, vocab: int) -> None:
    """A config and a tokenizer of ``vocab`` tokens."""
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=64,  # as of real ones; a trie of the backend's has a depth
        show_progress=False,
    )
    backend.train_from_iterator(_sources(), trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    print(f"{backend.get_vocab_size()} tokens", file=sys.stderr)


def _sources() -> Iterator[str]:
    left = TRAINED_ON
    for root in (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"]):
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            left -= len(text)
            if left < 0:
                return
            yield text


def schema_of(row: int) -> str:
    """A schema that no other row has, and whose answers are longer than any run."""
    item = {
        "type": "object",
        "properties": {
            f"name_{row}": {"type": "string", "maxLength": 24},
            f"kind_{row}": {"enum": [f"a{row}", f"b{row}", None]},
            "size": {"type": "number", "minimum": row},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 4},
        },
        "required": [f"name_{row}", "size"],
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": item, "minItems": 1_000})


def alone(folder: Path, rows: int) -> dict[str, float]:
    """Compiles and masks with nothing beside them, one after the other."""
    compiler = GuidanceBackend(folder, QWEN3_8B["vocab_size"])
    draw, compiles, masks = random.Random(0), list[float](), list[float]()
    for row in range(rows):
        wanted = StructuredOutputsParams(json=schema_of(row), disable_any_whitespace=True)
        started = time.perf_counter()
        grammar = compiler.compile(wanted)
        compiles.append(time.perf_counter() - started)
        for _ in range(40):
            started = time.perf_counter()
            mask = make_mask(grammar, QWEN3_8B["vocab_size"], ())
            masks.append(time.perf_counter() - started)
            allowed = _allowed(mask)
            grammar.accept([draw.choice(allowed)])
    return {
        "compile_ms_p50": 1e3 * statistics.median(compiles),
        "compile_ms_max": 1e3 * max(compiles),
        "mask_us_p50": 1e6 * statistics.median(masks),
        "mask_us_p99": 1e6 * _percentile(masks, 99),
    }


def _allowed(mask: bytes) -> list[int]:
    found = []
    for at, byte in enumerate(mask):
        while byte:
            low = byte & -byte
            found.append(8 * at + low.bit_length() - 1)
            byte ^= low
    return found


@dataclass
class Seen:
    """When the tokens of one kind of row came."""

    counts: dict[str, int] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)

    def take(self, name: str, tokens: int, now: float) -> None:
        """Tokens of a row came."""
        count = self.counts[name] = self.counts[name] + tokens
        if count > WARM and name in self.last:
            self.gaps += [(now - self.last[name]) / tokens] * tokens
        self.last[name] = now

    @property
    def told(self) -> dict[str, float]:
        """Milliseconds between tokens."""
        return {
            "itl_ms_p50": 1e3 * statistics.median(self.gaps),
            "itl_ms_mean": 1e3 * statistics.mean(self.gaps),
            "itl_ms_p99": 1e3 * _percentile(self.gaps, 99),
        }


def run(rig: Rig, tokens: int, free: int, held: int, slow: int) -> dict[str, dict[str, float]]:
    """Gaps of each kind of row, until each row of the quick kinds has ``tokens`` tokens."""
    draw, seen = random.Random(7), {"free": Seen(), "constrained": Seen(), "slow": Seen()}
    forms: dict[str, list[StructuredOutputsParams | None]] = {
        "free": [None] * free,
        "constrained": [
            StructuredOutputsParams(json=schema_of(row), disable_any_whitespace=True)
            for row in range(held)
        ],
        "slow": [StructuredOutputsParams(regex=SLOW)] * slow,
    }
    kinds: dict[str, str] = {}
    for kind, wanted in forms.items():
        for form in wanted:
            name = f"{kind}-{time.perf_counter_ns()}"
            kinds[name] = kind
            seen[kind].counts[name] = 0
            rig.core.add(
                EngineCoreRequest(
                    key=RequestKey(ROUTER, name, 0),
                    prompt_token_ids=draw.choices(range(1_000, 40_000), k=PROMPT),
                    params=SamplingParams(
                        temperature=1.0,
                        top_p=0.95,
                        seed=len(kinds),
                        max_tokens=tokens + 400,
                        ignore_eos=True,
                        structured_outputs=form,
                    ),
                )
            )
    quick = [seen[kind] for kind in ("free", "constrained") if forms[kind]]
    while any(count < tokens for each in quick for count in each.counts.values()):
        stepped = rig.step()
        now = time.perf_counter()
        for outputs in stepped.outputs.values():
            for output in outputs:
                if output.request in kinds:
                    seen[kinds[output.request]].take(output.request, len(output.token_ids), now)
        if not stepped.progressed:
            time.sleep(2e-5)
    rig.abort_all()
    return {kind: each.told for kind, each in seen.items() if each.gaps}


def _percentile(values: list[float], which: int) -> float:
    return statistics.quantiles(values, n=100)[which - 1]


if __name__ == "__main__":
    main()
