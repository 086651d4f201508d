"""docs/reference/parameters.md: request fields without effect, and those that are refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from scripts.reference.table import MADE, code, table

from tandem.router.api.anthropic import body as anthropic
from tandem.router.api.openai.bodies import hints, parameters, pooling_schemas
from tandem.router.api.openai.bodies.hints import Hint
from tandem.router.api.openai.bodies.parameters import Refused
from tandem.router.http.errors import written

_HEAD = f"""# Hints and refused parameters

{MADE}
A known field that this server does not support is a hint or is refused. In both tables null is
the same as absent. A name that no table and no page lists is refused.
"""
_HINTS = """## Hints

A hint asks for nothing that an answer could lack. It is accepted and has no effect. The header
`x-tandem-ignored` of the answer names the hints of its request, and the metric
`tandem:router_hints_ignored` counts them by name. Values that ask for nothing, such as
`store: false`, are not reported.
"""
_REFUSED = """## Refused

The values under *accepted* ask for nothing; clients send them by default. Any other value is 400.
"""
_POOLED = "vectors and scores"
_EACH_POOLED = "embeddings, pooling, classify, score, rerank"
HINTS: list[tuple[str, str, Mapping[str, Hint]]] = [
    ("chat", "", hints.CHAT),
    ("completions", "", hints.COMPLETION),
    ("responses", "", hints.RESPONSES),
    ("messages", "", hints.MESSAGES),
    ("count_tokens", "", hints.COUNT),
    (_POOLED, "", hints.POOLED),
    ("chat", "stream_options.", hints.STREAM_OPTIONS),
    ("completions", "stream_options.", hints.STREAM_OPTIONS),
    ("responses", "text.", hints.RESPONSE_TEXT),
    ("responses", "reasoning.", hints.RESPONSE_REASONING),
    ("responses", "tools[].", hints.RESPONSE_TOOL),
    ("messages", "tools[].", hints.MESSAGE_TOOL),
    ("count_tokens", "tools[].", hints.MESSAGE_TOOL),
    ("responses", "input[].", hints.RESPONSE_ITEM),
    ("messages", "thinking.", hints.THINKING),
    ("count_tokens", "thinking.", hints.THINKING),
]
REFUSED: list[tuple[str, str, Mapping[str, Refused]]] = [
    ("chat", "", parameters.CHAT),
    ("completions", "", parameters.COMPLETION),
    ("chat", "structured_outputs.", parameters.STRUCTURED_OUTPUTS),
    ("completions", "structured_outputs.", parameters.STRUCTURED_OUTPUTS),
    ("chat", "response_format.", parameters.RESPONSE_FORMAT),
    ("completions", "response_format.", parameters.RESPONSE_FORMAT),
    ("tokenize", "", parameters.TOKENIZE),
    ("responses", "", parameters.RESPONSES),
    ("responses", "reasoning.", parameters.RESPONSE_REASONING),
    ("responses", "tools[].", parameters.RESPONSE_TOOL),
    ("responses", "input[].", parameters.RESPONSE_ITEM),
    ("messages", "", anthropic.MESSAGES),
    ("count_tokens", "", anthropic.COUNT),
    ("messages", "tools[].", anthropic.TOOL),
    ("count_tokens", "tools[].", anthropic.TOOL),
    ("embeddings", "", pooling_schemas.EmbeddingBody.REFUSED),
    ("pooling", "", pooling_schemas.PoolingBody.REFUSED),
    ("classify", "", pooling_schemas.ClassifyBody.REFUSED),
    ("score", "", pooling_schemas.ScoreBody.REFUSED),
    ("rerank", "", pooling_schemas.RerankBody.REFUSED),
]
"""API, prefix of the names, and table of the code."""


def page() -> str:
    """Return the whole page."""
    hinted = [*_joined(_hints())]
    for name, (apis, hint) in hints.CONDITIONS.items():
        hinted.append((code(name), apis, hint.accepted, hint.why))
    head = ("parameter", "of", "accepted")
    return "\n".join(
        [
            _HEAD,
            _HINTS,
            table((*head, "why it has no effect"), sorted(hinted)),
            _REFUSED,
            table((*head, "why not more"), sorted(_joined(_refused()))),
        ]
    )


def _hints() -> Iterator[tuple[str, str, str, str]]:
    for api, prefix, found in HINTS:
        yield from (
            (code(prefix + name), api, each.accepted, each.why) for name, each in found.items()
        )


def _refused() -> Iterator[tuple[str, str, str, str]]:
    for api, prefix, found in REFUSED:
        for name, each in found.items():
            values = ", ".join(code(written(value)) for value in each.neutral) or "nothing"
            yield code(prefix + name), api, values, each.why


def _joined(
    rows: Iterable[tuple[str, str, str, str]],
) -> Iterator[tuple[str, str, str, str]]:
    """Join rows that differ in the API alone."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for name, api, *rest in rows:
        found.setdefault((name, rest[0], rest[1]), {})[api] = None
    for (name, accepted, why), apis in found.items():
        yield name, ", ".join(apis).replace(_EACH_POOLED, _POOLED), accepted, why
