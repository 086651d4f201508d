"""Answers of this server as types for the OpenAPI document; nothing else uses them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length", "abort", "error", "tool_calls"]
PromptLogprobs = list[dict[str, "TokenScore"] | None]


class Answer(BaseModel):
    """An object with these members only."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    """Cause of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answer):
    """Answer with a status of 400 or more."""

    error: ErrorDetail


class PromptDetails(Answer):
    """Counts of a prompt's tokens."""

    cached_tokens: int


class CompletionDetails(Answer):
    """Counts of an answer's tokens."""

    reasoning_tokens: int


class Usage(Answer):
    """Tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class TokenScore(Answer):
    """A token of a prompt, under its id."""

    logprob: float
    rank: int
    decoded_token: str


class TopLogprob(Answer):
    """A token that could have been drawn."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token that was drawn."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of a chat's choice."""

    content: list[ChatLogprob]
    refusal: None


class CalledFunction(Answer):
    """Name and arguments of a called function."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Answer):
    """Message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    """Choice of a chat."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatCompletion(Answer):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None


class FunctionDelta(Answer):
    """New part of a function's call."""

    name: str | None = None
    arguments: str


class ToolCallDelta(Answer):
    """New part of a call; the first has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(Answer):
    """New part of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Answer):
    """New part of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(Answer):
    """An event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class TextLogprobs(Answer):
    """Log-probabilities of a completion's choice, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChunkChoice(Answer):
    """New part of one choice."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextChoice(TextChunkChoice):
    """Choice of a completion."""

    prompt_logprobs: PromptLogprobs | None


class Completion(Answer):
    """The answer to prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    system_fingerprint: None


class CompletionChunk(Answer):
    """An event of a completion's stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: Usage | None = None


class Model(Answer):
    """Name of a model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(Answer):
    """List of the served models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Answer):
    """The answer of ``/tokenize``."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer):
    """The answer of ``/detokenize``."""

    prompt: str


class Status(BaseModel):
    """Short status of the server."""

    model_config = ConfigDict(extra="allow")


def models() -> list[type[BaseModel]]:
    """Return the types of the document."""
    found: list[type[Any]] = [ErrorBody, ChatCompletion, ChatChunk, Completion, CompletionChunk]
    return [*found, Model, ModelList, Tokens, Text, Status]


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
    """One document; ``index`` is its index in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankList(PooledAnswer):
    """The answer of ``/v1/rerank``."""

    results: list[Ranked]


def pooling_models() -> list[type[Any]]:
    """Return the types of the document."""
    return [EmbeddingList, PoolingList, ClassificationList, ScoreList, RerankList]
