"""SmolLM2 as a model that thinks: two of its tokens become marks of thoughts."""

from __future__ import annotations

import json
from pathlib import Path

RENAMED = {"<gh_stars>": "<think>", "<issue_start>": "</think>"}
"""Tokens that SmolLM2 never writes, to those of a model that thinks."""


def thinker_of(smollm2: Path, folder: Path) -> Path:
    """SmolLM2 with marks of thoughts, one of which its template opens."""
    folder.mkdir()
    for each in smollm2.iterdir():
        if each.name not in ("tokenizer.json", "tokenizer_config.json"):
            (folder / each.name).symlink_to(each.resolve())
    backend = json.loads((smollm2 / "tokenizer.json").read_text())
    for token in backend["added_tokens"]:
        token["content"] = RENAMED.get(token["content"], token["content"])
    vocabulary = backend["model"]["vocab"]
    for old, new in RENAMED.items():
        vocabulary[new] = vocabulary.pop(old)
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    settings = json.loads((smollm2 / "tokenizer_config.json").read_text())
    text = json.dumps(settings)
    for old, new in RENAMED.items():
        text = text.replace(old, new)
    settings = json.loads(text)
    ends = "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}{# </think> #}"
    template = settings.get("chat_template") or (smollm2 / "chat_template.jinja").read_text()
    settings["chat_template"] = template + ends
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder
