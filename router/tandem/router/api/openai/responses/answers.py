"""Answers of the Responses API: types for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tandem.router.api.openai.answers.types import Answer, ChatLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    """Text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprob]


class InputText(Answer):
    """Text of a question."""

    type: Literal["input_text"]
    text: str


class RefusalPart(Answer):
    """A refusal that a client keeps in a history."""

    type: Literal["refusal"]
    refusal: str


class ReasoningText(Answer):
    """Reasoning of the model, or its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class MessageItem(Answer):
    """Message of a turn."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant", "user", "system", "developer"]
    content: list[OutputText | InputText | RefusalPart]


class FunctionCallItem(Answer):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Answer):
    """Output of a call."""

    id: str
    type: Literal["function_call_output"]
    status: ItemStatus
    call_id: str
    output: str | list[InputText | OutputText | RefusalPart]


class ReasoningItem(Answer):
    """Reasoning of the model."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus | None = None
    summary: list[ReasoningText]
    content: list[ReasoningText]


OutputItem = MessageItem | FunctionCallItem | ReasoningItem


class InputDetails(Answer):
    """Counts of the prompt tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Answer):
    """Counts of the generated tokens."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFault(Answer):
    """Reason of a failed response."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(Answer):
    """Reason of an incomplete response."""

    reason: Literal["max_output_tokens"]


class ResponseObject(Answer):
    """The answer to a conversation."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    background: Literal[False]
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: dict[str, dict[str, Any]]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int | None
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(BaseModel):
    """An event of a response's stream; its name is its type."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.function_call_arguments.delta",
        "response.output_text.done",
        "response.reasoning_text.done",
        "response.function_call_arguments.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None


class InputItems(Answer):
    """Page of a response's input."""

    object: Literal["list"]
    data: list[MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Answer):
    """Deleted response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


def models() -> list[type[BaseModel]]:
    """Return the types of the document."""
    return [ResponseObject, ResponseEvent, InputItems, DeletedResponse]
