"""Answers of the Messages API: types for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from tandem.router.api.openai.answers.types import Answer

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextBlock(Answer):
    """Text of the model."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    """Reasoning of the model; it is not signed."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Answer):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(Answer):
    """Counts of the generated tokens."""

    thinking_tokens: int


class MessageUsage(Answer):
    """Tokens of a message."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | None = None


class MessageObject(Answer):
    """The answer to messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class BlockDelta(Answer):
    """New part of a block."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"]
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None


class MessageDelta(Answer):
    """End of a message."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageErrorDetail(Answer):
    """Cause of an error; the message names the field."""

    type: str
    message: str


class MessageError(Answer):
    """Answer with a status of 400 or more."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str


class MessageEvent(Answer):
    """An event of a message's stream; its name is its type."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    index: int | None = None
    message: MessageObject | None = None
    content_block: Block | None = None
    delta: BlockDelta | MessageDelta | None = None
    usage: MessageUsage | None = None
    error: MessageErrorDetail | None = None
    request_id: str | None = None


class TokenCount(Answer):
    """Number of tokens of messages."""

    input_tokens: int


def models() -> list[type[BaseModel]]:
    """Return the types of the document."""
    return [MessageObject, MessageEvent, MessageError, TokenCount]
