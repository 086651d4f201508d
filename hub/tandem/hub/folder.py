"""Check of prepared folders, and their fingerprint.

A prepared folder has Hugging Face's layout: config.json, tokenizer.json and safetensors files.
Values are not checked.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

from tandem.base.settings import setting
from tandem.hub.cache import sampled_digest
from tandem.hub.errors import ModelNotFound, UnsupportedModel
from tandem.protocol.errors import InvalidParameter

_LENGTH = struct.Struct("<Q")
_HEADER_LIMIT = 100 << 20
"""Bound of the header in the format."""
_LFS = b"version https://git-lfs"


def check_whole(path: Path) -> None:
    """Raise UnsupportedModel that names the expected and the actual size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        _check_start(path, start + file.read(len(_LFS) - len(start)), size)
        (length,) = _LENGTH.unpack(start)
        if length > _HEADER_LIMIT:
            raise UnsupportedModel(
                f"model: {path} is not a safetensors file: a header of {length} B"
            )
        _check_size(path, _LENGTH.size + length, size)
        file.seek(_LENGTH.size)
        header = _header(path, file.read(length))
    _check_size(path, _LENGTH.size + length + _data_size(path, header), size)


def check_pointer(path: Path, start: bytes) -> None:
    """Raise UnsupportedModel for a Git LFS pointer."""
    if start.startswith(_LFS):
        raise UnsupportedModel(
            f"model: {path} is a pointer of Git LFS, not the file itself; `git lfs pull` fetches it"
        )


def _check_start(path: Path, start: bytes, size: int) -> None:
    if size == 0:
        raise UnsupportedModel(f"model: {path} is empty")
    check_pointer(path, start)
    _check_size(path, _LENGTH.size, size)


def _check_size(path: Path, wanted: int, size: int) -> None:
    if size < wanted:
        raise UnsupportedModel(
            f"model: {path} is truncated: {size} bytes of at least {wanted}; fetch it again"
        )


def _header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except ValueError as error:
        raise UnsupportedModel(f"model: {path} is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise UnsupportedModel(
            f"model: {path} is not a safetensors file: its header is not an object"
        )
    return header


def _data_size(path: Path, header: dict[str, Any]) -> int:
    try:
        ends = [int(each["data_offsets"][1]) for key, each in header.items() if key[:2] != "__"]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise UnsupportedModel(
            f"model: {path} is not a safetensors file: a tensor without data_offsets"
        ) from error
    if not ends:
        raise UnsupportedModel(f"model: {path} holds no tensors")
    return max(ends)


_INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OTHER_KINDS = {
    "adapter_config.json": "a LoRA adapter, which is not served; merge it into its base model",
    "model_index.json": "a pipeline of diffusers, which is not served",
    "params.json": "Mistral's own format; a folder in Hugging Face's layout is needed",
}
"""Files of models in other layouts."""
_OTHER_TOKENIZERS = (
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_VOLATILE = ("_name_or_path", "transformers_version")
"""Keys of config.json about the model's origin."""


def check(path: Path, *, weights: bool) -> None:
    """Raise ModelNotFound or UnsupportedModel for the first missing file.

    Without ``weights`` a config.json is enough.
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
    """Raise the error of a folder or repository without config.json."""
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
    """Raise the error of a folder or repository without safetensors."""
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
    """Return 32 hex digits over config.json and samples of the weight files.

    Without ``weights`` only config.json counts.
    """
    config = read_json(path / "config.json")
    kept = {key: value for key, value in config.items() if key not in _VOLATILE}
    state = hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16)
    if weights:
        for file in weight_files(path):
            state.update(file.name.encode() + sampled_digest(file))
    return state.hexdigest()


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files that are loaded, sorted by name.

    They are those of the index, else model.safetensors, else all. Raises ModelNotFound or
    UnsupportedModel.
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
    """Return the files of a folder's index, sorted; None without an index.

    Raises UnsupportedModel for an empty index, or files of another folder.
    """
    index = path / _INDEX
    if not index.is_file():
        return None
    weight_map = read_json(index).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UnsupportedModel(f"model: {index} has no weight_map from tensors to files next to it")
    return sorted(names)


def _listed(names: list[str]) -> str:
    """Return ``1 weight file: a`` or ``3 weight files: a, b, c``, with at most three names."""
    kind = "1 weight file" if len(names) == 1 else f"{len(names)} weight files"
    return f"{kind}: {', '.join(names[:3])}{', and more' if len(names) > 3 else ''}"


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file. Errors name the file."""
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
    """Raise ModelNotFound or UnsupportedModel for a folder without a usable tokenizer."""
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


GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
CONFIG = "config.json"
OWN, NEUTRAL = ("", "auto"), ("vllm", "none")
_OF_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE,
    "additional_chat_templates",
)
_NAMES_A_FILE = 255
"""Maximum characters of a file's name; longer texts are templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Replacements of the model's own files; empty texts replace nothing."""

    tokenizer: str = setting(
        "", "Model source of the tokenizer and the chat template. Default: the model."
    )
    chat_template: str = setting(
        "", "File with a chat template in Jinja, or the template itself, for all requests."
    )
    generation_config: str = setting(
        "",
        "Folder or file with sampling defaults (generation_config.json). auto: the model's; vllm"
        " or none: neutral defaults.",
    )
    override_generation_config: str = setting(
        "", "JSON object of sampling defaults that replace those of generation_config.json."
    )
    hf_overrides: str = setting("", "JSON object of keys that replace those of config.json.")

    def __post_init__(self) -> None:
        for name in ("hf_overrides", "override_generation_config"):
            _object(name, getattr(self, name))

    def __bool__(self) -> bool:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return any(value for name, value in given.items() if (name, value) != _LEFT)


_LEFT = ("generation_config", "auto")


def linked(source: Path, target: Path, files: ModelFiles, tokenizer: Path | None) -> None:
    """Fill the folder ``target`` with links to ``source`` and replacements.

    ``tokenizer`` is the prepared folder of ``files.tokenizer``. Raises a HubError or
    InvalidParameter.
    """
    replaced = _replaced(source, files)
    skipped = {*replaced, *(_OF_TOKENIZER if tokenizer is not None else ())}
    if files.generation_config not in OWN:
        skipped.add(GENERATION)
    if TEMPLATE in replaced:
        skipped.add("additional_chat_templates")
    for each in source.iterdir():
        if each.name not in skipped and not each.name.startswith("."):
            (target / each.name).symlink_to(each.absolute())
    theirs = [] if tokenizer is None else [tokenizer / name for name in _OF_TOKENIZER]
    for each in theirs:
        if each.name not in replaced and each.exists():
            (target / each.name).symlink_to(each.absolute())
    for name, text in replaced.items():
        (target / name).write_text(text, encoding="utf-8")


def name_of(source: Path, files: ModelFiles, tokenizer: Path | None) -> str:
    """Return a name for the folder that ``linked`` fills, determined by its content."""
    state = blake2b(digest_size=8)
    for each in sorted(source.iterdir()):
        stat = each.stat()
        state.update(f"{each}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    state.update(json.dumps([str(tokenizer), *sorted(_replaced(source, files).items())]).encode())
    state.update(str(files.generation_config in OWN).encode())
    return f"{source.name}-{state.hexdigest()}"


def _replaced(source: Path, files: ModelFiles) -> dict[str, str]:
    found: dict[str, str] = {}
    if files.hf_overrides:
        own = read_json(source / CONFIG)
        found[CONFIG] = json.dumps(_merged(own, _object("hf_overrides", files.hf_overrides)))
    if files.chat_template:
        found[TEMPLATE] = template_text(files.chat_template)
    defaults = _defaults(source, files.generation_config)
    further = _object("override_generation_config", files.override_generation_config)
    if defaults is not None or further:
        own = read_json(source / GENERATION) if (source / GENERATION).is_file() else {}
        found[GENERATION] = json.dumps((own if defaults is None else defaults) | further)
    return found


def _defaults(source: Path, given: str) -> dict[str, Any] | None:
    """Return the sampling defaults that replace the model's; None leaves them."""
    if given in OWN:
        return None
    path = source / GENERATION
    if given not in NEUTRAL:
        other = Path(given).expanduser()
        other = other / GENERATION if other.is_dir() else other
        if not other.is_file():
            allowed = f"auto, vllm, none, or a folder that holds {GENERATION}"
            raise InvalidParameter("generation_config", given, allowed)
        return read_json(other)
    own = read_json(path) if path.is_file() else {}
    return {key: value for key, value in own.items() if key.endswith("_token_id")}


def template_text(given: str) -> str:
    """Return the template in the file ``given``, or ``given`` if it is a template."""
    if len(given) <= _NAMES_A_FILE and "\n" not in given:
        path = Path(given).expanduser()
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise UnsupportedModel(f"chat_template: {path} cannot be read: {error}") from error
    if not any(mark in given for mark in ("{{", "{%", "{#")):
        raise ModelNotFound(
            f"chat_template: {given[:120]!r} is neither a file here nor a Jinja template"
        )
    return given


def _merged(own: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    result = dict(own)
    for key, value in given.items():
        inner = result.get(key)
        if isinstance(value, dict) and isinstance(inner, dict):
            value = _merged(inner, value)
        result[key] = value
    return result


def _object(name: str, text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(name, text, f"a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise InvalidParameter(name, text, 'a JSON object, such as {"key": 1}')
    return value
