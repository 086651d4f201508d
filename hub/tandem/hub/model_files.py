"""Files of a model that a user replaces: tokenizer, chat template, sampling defaults, config.

The result is a folder of links to the model's own files with the replaced ones next to them, so
that workers, router and ``LLM`` read one folder as they read any other. Kept in the cache, under a
name that says what it was made of.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tandem.hub.errors import ModelNotFound, UnsupportedModel
from tandem.hub.folder import read_json
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.settings import setting

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
"""Characters of a file's name at most: longer words are templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Replacements of the model's own files; an empty text replaces nothing."""

    tokenizer: str = setting(
        "", "Model source whose tokenizer and chat template are used in place of the model's."
    )
    chat_template: str = setting(
        "", "File with a chat template in Jinja, or the template itself, for all requests."
    )
    generation_config: str = setting(
        "",
        "Folder or file with the sampling defaults (generation_config.json); auto is the model's "
        "own, vllm or none is neutral ones.",
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
    """Fill the empty folder ``target`` with links to ``source`` and what replaces its files.

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
    """Return a name for the folder that ``linked`` fills: equal where its content is."""
    state = blake2b(digest_size=8)
    for each in sorted(source.iterdir()):
        stat = each.stat()
        state.update(f"{each}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    state.update(json.dumps([str(tokenizer), *sorted(_replaced(source, files).items())]).encode())
    state.update(str(files.generation_config in OWN).encode())
    return f"{source.name}-{state.hexdigest()}"


def _replaced(source: Path, files: ModelFiles) -> dict[str, str]:
    """Return the texts of the files that are replaced, by name."""
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
    """Return the template in the file ``given``, or ``given`` itself if it is one."""
    if len(given) <= _NAMES_A_FILE and "\n" not in given:
        path = Path(given).expanduser()
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise UnsupportedModel(f"chat_template: {path} cannot be read: {error}") from error
    if not any(mark in given for mark in ("{{", "{%", "{#")):
        raise ModelNotFound(
            f"chat_template: {given[:120]!r} is no file here, and no template in Jinja"
        )
    return given


def _merged(own: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return ``own`` with the keys of ``given``; objects within are merged likewise."""
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
