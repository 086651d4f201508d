"""One GGUF file → the files of a prepared folder. Tensors whose values change are in memory, by
shard."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from tandem.hub.gguf import tensors as weights_of
from tandem.hub.gguf.config import generation_config, model_config
from tandem.hub.gguf.reader import PLAIN_TYPES, GgufModel
from tandem.hub.gguf.tokenizer import write_tokenizer

_MODES = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}
_NONE = 0
_MODULE = "sentence_transformers.models"


def write_pooling(model: GgufModel, hidden_size: int, folder: Path) -> None:
    """Write modules.json and its parts, if the file names a pooling. Raises UnsupportedModel."""
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


log = logging.getLogger(__name__)


def convert(source: Path, folder: Path, *, progress: bool = True, weights: bool = True) -> None:
    """Fill ``folder`` from ``source``; without ``weights`` only config and tokenizer.

    Raises UnsupportedModel before anything large is written.
    """
    started = time.monotonic()
    model = GgufModel(source)
    tensors = model.tensors()
    dtype = weights_of.target_dtype(tensors)
    config = model_config(model, tensors, dtype)
    targets = weights_of.plan(tensors, config)
    kinds = weights_of.packed_kinds(targets)
    if kinds:
        config["quantization_config"] = {"quant_method": "gguf", "kinds": kinds}
    write_tokenizer(model, folder)
    write_pooling(model, config["hidden_size"], folder)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(model))
    if weights:
        _write_weights(targets, folder, dtype, f"converting {source.name}", shown=progress)
    size = sum(file.stat().st_size for file in folder.iterdir())
    seconds = time.monotonic() - started
    log.info(
        "converted %s: %.2f GB in %.1f s, %s",
        source.name,
        size / 1e9,
        seconds,
        _kept(targets, dtype),
    )


def _kept(targets: list[weights_of.Target], dtype: str) -> str:
    """Return the kinds that stay packed and those that are dequantized, for the log."""
    kinds = {each.tensor.kind for each in targets} - PLAIN_TYPES.keys()
    packed, others = kinds & weights_of.PACKED, kinds - weights_of.PACKED
    words = [f"{', '.join(sorted(packed))} kept packed"] if packed else []
    words += [f"{', '.join(sorted(others))} dequantized to {dtype}"] if others else []
    return "; ".join(words) or f"all in {dtype}"


def _write_weights(
    targets: list[weights_of.Target], folder: Path, dtype: str, what: str, *, shown: bool
) -> None:
    total = sum(target.tensor.size for target in targets)
    with _bar(shown) as bar:
        task: TaskID = bar.add_task(what, total=total)
        index = weights_of.write(
            targets, folder, dtype, lambda values: bar.update(task, advance=values)
        )
    if index:
        _write_json(folder / "model.safetensors.index.json", index)


@contextmanager
def _bar(shown: bool) -> Iterator[Progress]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        yield bar


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
