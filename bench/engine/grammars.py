"""Measure the processor time of each backend of structured output: a compile, and a mask.

    python bench/engine/grammars.py [--texts 10]

The embedded model's vocabulary (49,152 tokens), no engine, the libraries in this process. Forms of
one kind differ in a name, so that none is compiled twice. Masks are made along random answers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from tandem.engine.structured.backends.guidance import GuidanceBackend
from tandem.engine.structured.child import BACKENDS, tokens_of
from tandem.engine.structured.process import PREPARED
from tandem.hub import DEFAULT_MODEL, prepare
from tandem.protocol.structured import StructuredOutputsParams

VOCAB = 49_152
MASKS = 40
"""Most masks of an answer."""
TEXT: dict[str, Any] = {"type": "string", "maxLength": 24}
KINDS: dict[str, dict[str, Any]] = {
    "flat": {
        "name": TEXT,
        "size": {"type": "integer"},
        "kind": {"type": "string", "enum": ["a", "b"]},
    },
    "list": {"tags": {"type": "array", "items": TEXT, "maxItems": 4}},
    "nested": {"at": {"type": "object", "properties": {"x": {"type": "number"}, "y": TEXT}}},
}


def schema_of(kind: str, at: int) -> str:
    """Return a schema with a property of its own."""
    properties = {f"id_{at}": {"type": "boolean"}, **KINDS[kind]}
    return json.dumps({"type": "object", "properties": properties, "required": [*properties]})


def measure(library: Any, prepared: Any, kind: str, texts: int) -> list[float]:
    """Return the median milliseconds of a compile, a mask, and its 99th percentile."""
    rng, compiles, masks = np.random.default_rng(0), list[float](), list[float]()
    for at in range(texts):
        wanted = StructuredOutputsParams(json=schema_of(kind, at))
        began = time.process_time()
        grammar = library.compile(prepared(wanted))
        compiles.append(1e3 * (time.process_time() - began))
        for _ in range(MASKS):
            words = bytearray(VOCAB // 8)
            began = time.process_time()
            grammar.fill(memoryview(words))
            masks.append(1e3 * (time.process_time() - began))
            allowed = np.flatnonzero(
                np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")
            )
            if not len(allowed):
                break
            grammar.accept([int(rng.choice(allowed))])
    return [statistics.median(compiles), statistics.median(masks), float(np.percentile(masks, 99))]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--texts", type=int, default=10, help="forms of each kind")
    args = parser.parse_args()
    folder = prepare(DEFAULT_MODEL, progress=False).path
    tokens = tokens_of(folder, VOCAB)
    for name in ("guidance", *PREPARED):
        library: Any = (
            BACKENDS[name](tokens) if name in BACKENDS else GuidanceBackend(folder, VOCAB)
        )
        prepared = PREPARED.get(name, lambda wanted: wanted)
        cells = [measure(library, prepared, kind, args.texts) for kind in KINDS]
        row = " | ".join(", ".join(f"{value:.3g}" for value in each) for each in cells)
        print(f"| `{name}` | {row} |", flush=True)


if __name__ == "__main__":
    main()
