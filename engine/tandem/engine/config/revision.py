"""The identity of a model's folder: workers whose revisions differ never exchange KV.

Digests config.json and, of each weight file that is loaded, its size, head (names, shapes, types)
and evenly spaced samples: reading gigabytes whole would cost seconds at every start. hub/ passes a
digest of the source if it has one (``--revision``).
"""

import os
from hashlib import blake2b
from pathlib import Path

from tandem.engine.config.model import ModelConfig
from tandem.engine.config.read import CONFIG
from tandem.engine.config.weight_files import indexed, unindexed

_HEAD_BYTES = 1 << 20
_SAMPLES = 16
_SAMPLE_BYTES = 4096


def revision_of(model: ModelConfig) -> str:
    """Return 32 hex digits of the folder's content; dummy weights are named by their seed."""
    digest = blake2b(digest_size=16, person=b"tandem-revision")
    folder = Path(model.model)
    config = folder / CONFIG
    if config.is_file():
        digest.update(config.read_bytes())
    if model.load_format == "dummy":
        digest.update(f"dummy {model.seed}".encode())
        return digest.hexdigest()
    for path in _loaded(folder):
        digest.update(path.name.encode())
        digest.update(_sampled(path))
    return digest.hexdigest()


def _loaded(folder: Path) -> list[Path]:
    """Return the weight files that exist; the loader reports what is wrong with them."""
    try:
        owners = indexed(folder)
    except ValueError:
        return []
    files = unindexed(folder) if owners is None else sorted(set(owners.values()))
    return [each for each in files if each.is_file()]


def _sampled(path: Path) -> bytes:
    """Return the size, head and evenly spaced pieces of a file."""
    size = path.stat().st_size
    digest = blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for index in range(_SAMPLES):
            file.seek(size * (index + 1) // (_SAMPLES + 1), os.SEEK_SET)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
