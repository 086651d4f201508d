"""The fields of a response other than its items."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.llm.outputs import RequestOutput
from tandem.router.openai.responses.body import ResponsesBody


def frame_of(body: ResponsesBody, response_id: str, model: str, created: int) -> dict[str, Any]:
    """Return the response without the answer's fields; fields that the client left out are null.

    Large values are JSON already: they go into several events, and into the store.
    """
    wanted = None if body.text is None else body.text.format
    text = (
        {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
    )
    tools = [tool.model_dump(include=set(type(tool).model_fields)) for tool in body.tools or ()]
    effort = None if body.reasoning is None else body.reasoning.effort
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": _raw(body.instructions),
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": _raw({"format": text}),
        "tool_choice": body.tool_choice or "auto",
        "tools": _raw(tools),
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def usage_of(output: RequestOutput, num_reasoning: int | None) -> dict[str, Any]:
    """Return the tokens of a response."""
    num_prompt, num_generated = len(output.prompt_token_ids), output.num_generated_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {
            "cached_tokens": output.num_cached_tokens or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": num_generated,
        "output_tokens_details": {"reasoning_tokens": num_reasoning or 0},
        "total_tokens": num_prompt + num_generated,
    }
