"""Reader of a prepared folder's tokenizer settings: end ids, templates, defaults.

A missing file counts as empty.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.text.errors import UnusableFolder

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
"""Special tokens that tokenizer_config.json names and chat templates may use."""

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """Tokenizer settings that are not in tokenizer.json."""

    named_tokens: dict[str, str] = field(default_factory=dict)
    """Text of each named token, by ``bos_token`` and so on."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end the output, from generation_config.json (else config.json)."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """Jinja sources by template name; the one without a name is ``default``."""
    config: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    """Content of generation_config.json: the model's sampling defaults."""


def read_settings(folder: Path) -> TokenizerSettings:
    """Return the settings of a model. Raises UnusableFolder for a file that is not JSON."""
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    eos = _ids(generation.get("eos_token_id"))
    if not eos:
        eos = _ids(_read_json(folder / "config.json").get("eos_token_id"))
    named = _named_tokens(_read_json(folder / "special_tokens_map.json")) | _named_tokens(config)
    return TokenizerSettings(
        named_tokens=named,
        eos_token_ids=eos,
        chat_templates=_templates(folder, config),
        config=config,
        generation=generation,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnusableFolder(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UnusableFolder(f"{path} holds no JSON object")
    return value


def _ids(value: object) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [value]
    return tuple(each for each in listed if isinstance(each, int) and not isinstance(each, bool))


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in NAMED_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the templates by name. Separate files have precedence over tokenizer_config.json."""
    found: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        found[DEFAULT_TEMPLATE] = inline
    elif isinstance(inline, list):
        found |= {each["name"]: each["template"] for each in inline}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        found[DEFAULT_TEMPLATE] = alone.read_text(encoding="utf-8")
    return found
