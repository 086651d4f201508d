"""Answers with vectors and scores, as types for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from tandem.router.openai.answers.types import Answer, Usage


class PooledAnswer(Answer):
    """Fields of every pooled answer."""

    id: str
    created: int
    model: str
    usage: Usage


class Embedding(Answer):
    """The vector of one input: numbers, or base64 of little-endian float32 values."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(PooledAnswer):
    """The answer of ``/v1/embeddings``."""

    object: Literal["list"]
    data: list[Embedding]


class Pooling(Answer):
    """Result of a task for one input."""

    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str


class PoolingList(PooledAnswer):
    """The answer of ``/pooling``."""

    object: Literal["list"]
    data: list[Pooling]


class Classification(Answer):
    """One input's probabilities, in the order of the model's labels, and the best label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(PooledAnswer):
    """The answer of ``/classify``."""

    object: Literal["list"]
    data: list[Classification]


class Score(Answer):
    """Score of a pair."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(PooledAnswer):
    """The answer of ``/v1/score``."""

    object: Literal["list"]
    data: list[Score]


class Document(Answer):
    """Document of the request."""

    text: str


class Ranked(Answer):
    """One document; ``index`` is its place in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankList(PooledAnswer):
    """The answer of ``/v1/rerank``."""

    results: list[Ranked]


def models() -> list[type[Any]]:
    """Return the types that the document names."""
    return [EmbeddingList, PoolingList, ClassificationList, ScoreList, RerankList]
