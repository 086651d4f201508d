"""What makes a folder a prepared one, and the fingerprint of what it holds.

A prepared folder has Hugging Face's layout: config.json, tokenizer.json and safetensors files. It
is checked before any process starts, so that a missing file is one clear line and not a worker's
traceback. Values are not checked; the loader does that.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from tandem.hub.digest import sampled_digest
from tandem.hub.errors import ModelNotFound, UnsupportedModel

_INDEX = "model.safetensors.index.json"
_VOLATILE = ("_name_or_path", "transformers_version")
"""Keys of config.json that say where a model was, not what it is."""


def check(path: Path, *, weights: bool) -> None:
    """Raises ModelNotFound or UnsupportedModel naming the first thing that is missing.

    With ``weights=False`` a config.json is enough.
    """
    config = read_json(path / "config.json")
    if not config.get("architectures") and not config.get("model_type"):
        raise UnsupportedModel(
            f"model: {path / 'config.json'} has neither architectures nor model_type"
        )
    if weights:
        weight_files(path)
        _check_tokenizer(path)


def fingerprint(path: Path, *, weights: bool) -> str:
    """32 hex digits over config.json and, unless ``weights`` is off, the weight files' contents.

    The same on every machine that has the same files; milliseconds, as files are sampled.
    """
    config = read_json(path / "config.json")
    kept = {key: value for key, value in config.items() if key not in _VOLATILE}
    state = hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16)
    if weights:
        for file in weight_files(path):
            state.update(file.name.encode() + sampled_digest(file))
    return state.hexdigest()


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, sorted by name; those that its index names, if it has one.

    Raises ModelNotFound when a shard is missing or there are none, UnsupportedModel when the
    weights are in another format.
    """
    if (path / _INDEX).is_file():
        names = sorted(set(read_json(path / _INDEX).get("weight_map", {}).values()))
        files = [path / str(name) for name in names]
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelNotFound(f"model: {path} lacks {len(missing)} weight files: {missing[0]} ...")
    if not files:
        _explain_no_weights(path)
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; the errors name the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(f"model: there is no {path}") from None
    except ValueError as error:
        raise UnsupportedModel(f"model: {path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"model: {path} holds a {type(value).__name__}, not an object")
    return value


def _explain_no_weights(path: Path) -> None:
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        raise UnsupportedModel(
            f"model: {path} holds GGUF, not safetensors; give the file itself: {ggufs[0]}"
        )
    others = sorted(file.name for file in path.glob("*.bin")) + sorted(
        file.name for file in path.glob("*.pt*")
    )
    if others:
        raise UnsupportedModel(
            f"model: {path} has weights in {others[0]}, which may run code when loaded; "
            f"only safetensors are allowed"
        )
    raise ModelNotFound(f"model: {path} has no *.safetensors")


def _check_tokenizer(path: Path) -> None:
    if (path / "tokenizer.json").is_file():
        return
    if (path / "tokenizer.model").is_file():
        raise UnsupportedModel(
            f"model: {path} has tokenizer.model only; tokenizer.json is needed "
            f"(transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) makes one)"
        )
    raise ModelNotFound(f"model: there is no {path / 'tokenizer.json'}")
