"""Read the files of sentence-transformers: length and case of texts, and prompts before them.

A length is followed. A case that the tokenizer does not make is refused. Prompts that would be put
before each text are named in the log: a client sends them with its texts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.engine.config.files import read_any, read_json
from tandem.protocol.errors import InvalidParameter

logger = logging.getLogger(__name__)

MODULES = "modules.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"
_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names that a transformer's own settings have had."""


def max_length_of(folder: Path) -> int | None:
    """Return the tokens of a text, at most, by a folder of sentence-transformers; None if it states
    none. Raises InvalidParameter for a case that is not supported."""
    if not (folder / MODULES).is_file():
        return None
    found = next((path for path in _settings_of(folder) if path.is_file()), None)
    said = {} if found is None else read_json(found, needed=True)
    if said.get("do_lower_case") and not _lowers(folder):
        allowed = "false: the tokenizer keeps the case of texts"
        raise InvalidParameter(f"{found and found.name}: do_lower_case", True, allowed)
    _name_prompts(read_json(folder / SENTENCE_CONFIG, needed=False))
    length = said.get("max_seq_length")
    if length is None:
        return None
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        name = f"{found and found.name}: max_seq_length"
        raise InvalidParameter(name, length, "a positive integer")
    return length


def _settings_of(folder: Path) -> Iterator[Path]:
    """Yield the paths at which the settings of the transformer may be."""
    modules = read_any(folder / MODULES)
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, dict) and str(module.get("type")).endswith(".Transformer"):
            for name in _CONFIGS:
                yield folder / str(module.get("path") or "") / name


def _lowers(folder: Path) -> bool:
    """Return whether the tokenizer lowercases its text."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return True  # it is not known before the folder is whole
    normalizer = read_json(path, needed=True).get("normalizer")
    written = json.dumps(normalizer)
    return '"lowercase": true' in written or '"type": "Lowercase"' in written


def _name_prompts(said: Mapping[str, Any]) -> None:
    """Log the prompt that sentence-transformers would put before each text."""
    name, prompts = said.get("default_prompt_name"), said.get("prompts")
    prompt = prompts.get(name) if isinstance(prompts, dict) and name is not None else None
    if prompt:
        logger.warning(
            "%s: default_prompt_name %r is not followed; send its prompt %r before each text",
            SENTENCE_CONFIG,
            name,
            prompt,
        )
