"""Check of prepared folders, and their fingerprint.

A prepared folder has Hugging Face's layout: config.json, tokenizer.json and safetensors files. It
is checked before any process starts, so that a missing or truncated file gives one clear line and
not a worker's traceback. Values are not checked; the loader does that.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from tandem.hub.digest import sampled_digest
from tandem.hub.errors import ModelNotFound, UnsupportedModel
from tandem.hub.safetensors_files import check_pointer, check_whole

_INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OTHER_KINDS = {
    "adapter_config.json": "a LoRA adapter, which is not served; merge it into its base model",
    "model_index.json": "a pipeline of diffusers, which is not served",
    "params.json": "Mistral's own format; a folder in Hugging Face's layout is needed",
}
"""Files of folders that are not models in Hugging Face's layout."""
_OTHER_TOKENIZERS = (
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_VOLATILE = ("_name_or_path", "transformers_version")
"""Keys of config.json that describe the model's origin, not its content."""


def check(path: Path, *, weights: bool) -> None:
    """Raise ModelNotFound or UnsupportedModel naming the first thing that is missing.

    With ``weights=False`` a config.json is enough.
    """
    if not (path / "config.json").exists():
        explain_no_config(path, (file.name for file in path.iterdir()))
    config = read_json(path / "config.json")
    if not config.get("architectures") and not config.get("model_type"):
        raise UnsupportedModel(
            f"model: {path / 'config.json'} has neither architectures nor model_type"
        )
    if weights:
        check_tokenizer(path)
        for file in weight_files(path):
            _check_weights(file)


def explain_no_config(path: Path | str, names: Iterable[str]) -> NoReturn:
    """Raise for a folder or repository without config.json, by the names of its files."""
    names = sorted(names)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        raise UnsupportedModel(
            f"model: {path} holds GGUF files and no config.json; name one of them: "
            f"{_several([f'{path}/{name}' for name in ggufs])}"
        )
    for name, what in _OTHER_KINDS.items():
        if name in names:
            raise UnsupportedModel(f"model: {path} has {name} and no config.json: {what}")
    raise ModelNotFound(f"model: there is no {path}/config.json")


def explain_no_weights(path: Path | str, names: Iterable[str]) -> NoReturn:
    """Raise for a folder or repository without safetensors, by the names of its files."""
    names = sorted(names)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        raise UnsupportedModel(
            f"model: {path} holds GGUF, not safetensors; give the file itself: "
            f"{_several([f'{path}/{name}' for name in ggufs])}"
        )
    others = [name for name in names if re.search(r"\.(bin|pt\w*|pkl|ckpt)$", name)]
    others += [name for name in names if re.search(r"\.(h5|msgpack|onnx|ot)$", name)]
    if others:
        raise UnsupportedModel(
            f"model: {path} has weights in {others[0]}, which may run code when loaded; "
            f"only safetensors are allowed (transformers' from_pretrained(...).save_pretrained "
            f"writes them)"
        )
    raise ModelNotFound(f"model: {path} has no *.safetensors")


def _several(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def fingerprint(path: Path, *, weights: bool) -> str:
    """Return 32 hex digits over config.json and samples of the weight files' contents.

    Without ``weights`` only config.json counts. The same on every machine that has the same files;
    takes milliseconds.
    """
    config = read_json(path / "config.json")
    kept = {key: value for key, value in config.items() if key not in _VOLATILE}
    state = hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16)
    if weights:
        for file in weight_files(path):
            state.update(file.name.encode() + sampled_digest(file))
    return state.hexdigest()


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a folder that are loaded, sorted by name.

    These are the files that its index names, else model.safetensors, else all.

    Raises ModelNotFound when a shard is missing or there are none, UnsupportedModel when the
    weights are in another format.
    """
    named = indexed_files(path)
    if named is not None:
        files = [path / name for name in named]
    elif (path / SINGLE).is_file():
        files = [path / SINGLE]
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelNotFound(f"model: {path} lacks {_listed(missing)}, which {_INDEX} names")
    if not files:
        explain_no_weights(path, (file.name for file in path.iterdir()))
    return files


def indexed_files(path: Path) -> list[str] | None:
    """Return the names of the files that a folder's index lists, sorted; None without one. Raises
    UnsupportedModel for an index that lists none, or one of another folder."""
    index = path / _INDEX
    if not index.is_file():
        return None
    weight_map = read_json(index).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UnsupportedModel(f"model: {index} has no weight_map from tensors to files beside it")
    return sorted(names)


def _listed(names: list[str]) -> str:
    """Return ``1 weight file: a`` or ``3 weight files: a, b, c``, at most three of them named."""
    kind = "1 weight file" if len(names) == 1 else f"{len(names)} weight files"
    return f"{kind}: {', '.join(names[:3])}{', and more' if len(names) > 3 else ''}"


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file; the errors name the file."""
    try:
        content = path.read_bytes()
        check_pointer(path, content)
        value = json.loads(content)
    except FileNotFoundError:
        raise ModelNotFound(f"model: there is no {path}") from None
    except OSError as error:
        raise UnsupportedModel(f"model: {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"model: {path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"model: {path} holds a {type(value).__name__}, not an object")
    return value


def _check_weights(file: Path) -> None:
    try:
        check_whole(file)
    except OSError as error:
        raise UnsupportedModel(f"model: {file} cannot be read: {error.strerror}") from error


def check_tokenizer(path: Path) -> None:
    """Raise ModelNotFound or UnsupportedModel for a folder without a tokenizer that is read."""
    if (path / "tokenizer.json").is_file():
        read_json(path / "tokenizer.json")
        return
    if (path / "tokenizer.model").is_file():
        raise UnsupportedModel(
            f"model: {path} has tokenizer.model only; tokenizer.json is needed "
            f"(transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) makes one)"
        )
    others = [name for name in _OTHER_TOKENIZERS if (path / name).is_file()]
    if others:
        raise UnsupportedModel(
            f"model: {path} has {others[0]} and no tokenizer.json, which is needed; "
            f"--tokenizer names a model that has the same tokens and a tokenizer.json"
        )
    raise ModelNotFound(
        f"model: there is no {path / 'tokenizer.json'}; --tokenizer names another model's"
    )
