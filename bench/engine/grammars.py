"""Measure the cost of each backend of structured output on a CPU: compiles, and masks a row.

    python bench/engine/grammars.py [--texts 40 --out bench/results/grammars_cpu.json]

The embedded model's vocabulary (49,152 tokens), no engine. Texts of one kind differ in a name, so
that none is compiled twice. Masks are made along random answers: all, and those of states that no
answer under the text has stood in before (an answer's first way through a grammar).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from tandem.engine.structured.backends import make_compiler
from tandem.engine.structured.constraint import make_mask
from tandem.engine.structured.grammar import Compiler
from tandem.hub import DEFAULT_MODEL, prepare
from tandem.protocol.structured import StructuredOutputsParams

VOCAB = 49_152
MASKS = 60
"""Of each answer, at most."""


def texts_of(at: int) -> dict[str, StructuredOutputsParams]:
    """The kinds, each of a name of its own."""
    schema = {
        "type": "object",
        "properties": {
            f"name_{at}": {"type": "string", "maxLength": 24},
            "kind": {"enum": [f"a{at}", f"b{at}", None]},
            "size": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 4},
        },
        "required": [f"name_{at}", "size"],
        "additionalProperties": False,
    }
    wanted = StructuredOutputsParams
    return {
        "choice of 50": wanted(choice=[f"Town {at} {each}" for each in range(50)]),
        "phone": wanted(regex=rf"{at}-\d{{3}}-\d{{4}}"),
        "words": wanted(regex=rf"{at}: ([A-Z][a-z]{{1,12}} ){{4,9}}[0-9]{{3}}"),
        "any text": wanted(regex=f"{at}: .{{1,200}}"),
        "schema": wanted(json=json.dumps(schema), disable_any_whitespace=True),
    }


def measure(compiler: Compiler, wanted: list[StructuredOutputsParams]) -> dict[str, float]:
    """Figures of texts of one kind."""
    draw, compiles, first, again = random.Random(0), list[float](), list[float](), list[float]()
    for text in wanted:
        started = time.perf_counter()
        grammar = compiler.compile(text)
        compiles.append(time.perf_counter() - started)
        way: list[int] = []
        for masks in (first, again):
            grammar.reset()
            for at in range(MASKS):
                started = time.perf_counter()
                mask = make_mask(grammar, VOCAB, ())
                masks.append(time.perf_counter() - started)
                if masks is first:
                    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
                    allowed = np.flatnonzero(bits)
                    if not len(allowed):
                        break
                    way.append(int(draw.choice(allowed)))
                if at == len(way):
                    break
                grammar.accept([way[at]])
                if grammar.is_terminated:
                    break
    return {
        "compile_ms_p50": 1e3 * statistics.median(compiles),
        "compile_ms_p99": 1e3 * float(np.percentile(compiles, 99)),
        "first_mask_us_p50": 1e6 * statistics.median(first),
        "first_mask_us_p99": 1e6 * float(np.percentile(first, 99)),
        "mask_us_p50": 1e6 * statistics.median(again),
        "mask_us_p99": 1e6 * float(np.percentile(again, 99)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--texts", type=int, default=40, help="of each kind")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = prepare(DEFAULT_MODEL, progress=False).path
    found: dict[str, Any] = {"texts": args.texts, "vocabulary": VOCAB}
    kinds = [texts_of(at) for at in range(args.texts)]
    for backend in ("guidance", "outlines"):
        compiler = make_compiler(backend, folder, VOCAB)
        compiler.compile(StructuredOutputsParams(choice=["the process is up"]))
        found[backend] = {
            kind: {
                name: round(value, 3)
                for name, value in measure(compiler, [each[kind] for each in kinds]).items()
            }
            for kind in kinds[0]
        }
        compiler.close()
        print(backend, json.dumps(found[backend], indent=1), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
