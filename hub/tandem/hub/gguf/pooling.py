"""``pooling_type`` of a GGUF file → the files by which sentence-transformers says the same.

llama.cpp's servers scale a vector to length one after any pooling; so does what is written here.
"""

import json
from pathlib import Path
from typing import Any

from tandem.hub.gguf.reader import GgufModel

_MODES = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}
_NONE = 0
_MODULE = "sentence_transformers.models"


def write_pooling(model: GgufModel, hidden_size: int, folder: Path) -> None:
    """Write modules.json and its parts, if the file names a pooling.

    Raises UnsupportedModel for a pooling that is not computed, such as a ranking head.
    """
    key = model.own("pooling_type")
    kind = model.get(key, _NONE)
    if kind == _NONE:
        return
    if kind not in _MODES:
        raise model.refusal(key, kind, "0 (none), 1 (mean), 2 (first token) or 3 (last token)")
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"{_MODULE}.{name}"}
        for index, (name, path) in enumerate(parts.items())
    ]
    modes = {f"pooling_mode_{mode}": number == kind for number, mode in _MODES.items()}
    for path in parts.values():
        (folder / path).mkdir(exist_ok=True)
    _write(folder / "modules.json", modules)
    settings = {"word_embedding_dimension": hidden_size, **modes}
    _write(folder / parts["Pooling"] / "config.json", settings)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
