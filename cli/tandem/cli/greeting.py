"""The example that `tandem up` prints when it serves: a request that this model can answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.cli.secret_flags import ENV_API_KEY
from tandem.engine.config import ModelFacts
from tandem.text.folder import DEFAULT_TEMPLATE, read_settings

_QUESTION = "What is the capital of France?"


def example(facts: ModelFacts, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request for the model in ``folder``, without the model's name."""
    pooling = facts.pooling
    if pooling.generates and DEFAULT_TEMPLATE in read_settings(folder).chat_templates:
        messages = [{"role": "user", "content": _QUESTION}]
        return "/v1/chat/completions", {"messages": messages, "temperature": 0}
    if pooling.generates:
        return "/v1/completions", {"prompt": "The capital of France is", "temperature": 0}
    if len(pooling.labels) == 1:
        documents = ["Paris is the capital of France.", "Bread is made of flour."]
        return "/v1/rerank", {"query": _QUESTION, "documents": documents}
    if pooling.labels:
        return "/classify", {"input": _QUESTION}
    return "/v1/embeddings", {"input": _QUESTION}


def greeting(url: str, name: str, request: tuple[str, dict[str, Any]], *, has_keys: bool) -> str:
    """Return the lines that show ``request`` as a command."""
    path, body = request
    key = f' \\\n    -H "Authorization: Bearer ${ENV_API_KEY}"' if has_keys else ""
    text = json.dumps({"model": name, **body}, ensure_ascii=False).replace("'", "'\\''")
    return (
        f"\n  curl {url}{path} -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{text}'\n\n  Ctrl-C stops everything.\n"
    )
