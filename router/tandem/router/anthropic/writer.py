"""One message as it grows: its blocks, and their events.

The same code writes whole answers, which keep the blocks and send no events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tandem.llm.outputs import CompletionOutput, RequestOutput
from tandem.protocol.finish import FinishReason
from tandem.router.anthropic.errors import error_object
from tandem.router.openai.errors import ErrorAnswer
from tandem.text.parsers.events import (
    ArgumentsDelta,
    CallBegun,
    ContentDelta,
    Event,
    ReasoningDelta,
)

_encode = msgspec.json.Encoder().encode


class MessageWriter:
    """Made for each answer."""

    def __init__(self, message_id: str, model: str, request_id: str, *, streams: bool) -> None:
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._request_id = request_id
        self._streams = streams
        self._out: list[bytes] = []
        self._texts: list[str] = []
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False

    def begin(self, output: RequestOutput) -> bytes:
        """Return the events before the first block."""
        usage = usage_of(output, None)
        self._say("message_start", message=self.message(None, None, {**usage, "output_tokens": 0}))
        self._say("ping")
        return self._flushed()

    def take(self, events: Iterable[Event]) -> bytes:
        """Return the events of a step's output; often none."""
        for event in events:
            match event:
                case ContentDelta(text):
                    self._go_on("text", {"text": ""})
                    self._delta("text_delta", text=text)
                case ReasoningDelta(text):
                    self._go_on("thinking", {"thinking": "", "signature": ""})
                    self._delta("thinking_delta", thinking=text)
                case CallBegun(_, call_id, name):
                    self._begin("tool_use", {"id": call_id, "name": name, "input": {}})
                case ArgumentsDelta(_, text):
                    self._delta("input_json_delta", partial_json=text)
        return self._flushed()

    def end(self, reason: str, sequence: str | None, usage: dict[str, Any]) -> bytes:
        """Return the last events."""
        self._close()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self._say("message_delta", delta=delta, usage=usage)
        self._say("message_stop")
        return self._flushed()

    def failed(self, answer: ErrorAnswer) -> bytes:
        """Return the last event of a stream that an error ends."""
        self._put("error", error_object(answer, self._request_id))
        return self._flushed()

    def message(
        self, reason: str | None, sequence: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the whole message so far."""
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        return {**self._head, "content": list(self._blocks), **stop, "usage": usage}

    def _go_on(self, kind: str, fields: dict[str, Any]) -> None:
        """Open a block of this kind, unless it is open already."""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            self._begin(kind, fields)

    def _begin(self, kind: str, fields: dict[str, Any]) -> None:
        self._close()
        block = {"type": kind, **fields}
        self._blocks.append(block)
        self._is_open = True
        self._say("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _delta(self, kind: str, **fields: str) -> None:
        self._texts += fields.values()
        delta = {"type": kind, **fields}
        self._say("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> None:
        """Close the open block."""
        if not self._is_open:
            return
        self._is_open = False
        block, text = self._blocks[-1], "".join(self._texts)
        self._texts.clear()
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        self._say("content_block_stop", index=len(self._blocks) - 1)

    def _say(self, kind: str, **fields: Any) -> None:
        if self._streams:
            self._put(kind, {"type": kind, **fields})

    def _put(self, kind: str, content: dict[str, Any]) -> None:
        self._out.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(content)))

    def _flushed(self) -> bytes:
        """Return the bytes written since the last call."""
        said = b"".join(self._out)
        self._out.clear()
        return said


def _object(text: str) -> dict[str, Any]:
    """Return the arguments of a call; {} unless the text is a JSON object (an early end)."""
    try:
        found = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def stop_of(
    choice: CompletionOutput, output: RequestOutput, *, num_calls: int, max_tokens: int
) -> tuple[str, str | None]:
    """Return the reason for a message's end, in Anthropic's terms, and the text that ended it."""
    if choice.finish_reason is not FinishReason.STOP:
        whole = output.num_generated_tokens >= max_tokens
        return "max_tokens" if whole else "model_context_window_exceeded", None
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return "tool_use" if num_calls else "end_turn", None


def usage_of(output: RequestOutput, num_reasoning: int | None) -> dict[str, Any]:
    """Return the tokens of a message; those of the prompt that were cached are counted apart."""
    num_cached = output.num_cached_tokens or 0
    details = {"output_tokens_details": {"thinking_tokens": num_reasoning}}
    return {
        "input_tokens": len(output.prompt_token_ids) - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": output.num_generated_tokens,
        **({} if num_reasoning is None else details),
    }
