"""Check of a head that config.json calls tied to the embeddings, while the weights hold another
one.

Many folders keep a copy of the embeddings as their head, which is right either way. If the two
differ, the model's flag is wrong: its answers would be another model's.
"""

from __future__ import annotations

from pathlib import Path

from tandem.engine.config.weight_files import Stored, stored_in
from tandem.protocol.errors import InvalidParameter

HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def check_tied(folder: Path) -> None:
    """Raise InvalidParameter if a folder with a tied head has weights of another head.

    Evenly spaced pieces of both are compared. Weights that cannot be read are left to the loader.
    """
    head = stored_in(folder, HEAD)
    found = (stored_in(folder, name) for name in _EMBEDDINGS)
    table = next((each for each in found if each is not None), None)
    if head is None or table is None:
        return
    try:
        equal = head.shape == table.shape and (head.dtype != table.dtype or _alike(head, table))
    except OSError:
        return
    if not equal:
        allowed = f"false: {HEAD} differs from the embeddings"
        raise InvalidParameter("config.json: tie_word_embeddings", True, allowed)


def _alike(one: Stored, other: Stored) -> bool:
    step = max(1, one.size // _SAMPLES)
    with one.path.open("rb") as first, other.path.open("rb") as second:
        for at in range(0, one.size, step):
            first.seek(one.start + at)
            second.seek(other.start + at)
            length = min(_SAMPLE_BYTES, one.size - at)
            if first.read(length) != second.read(length):
                return False
    return True
