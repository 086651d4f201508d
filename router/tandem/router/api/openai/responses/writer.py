"""One response as it grows: output items and their events.

Whole answers use the same code, without events.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.protocol.outputs import FinishReason
from tandem.router.api.openai.responses.items import Item, new_id, output_text
from tandem.router.http.errors import ErrorAnswer
from tandem.text.parsers.events import (
    ArgumentsDelta,
    CallBegun,
    ContentDelta,
    Event,
    ReasoningDelta,
)

_encode = msgspec.json.Encoder().encode
Logprobs = Sequence[dict[str, Any]]
_TOKEN_WEIGHT = 3.0
"""Cost of a token at one position, for ``CpuPool``."""
_TEXT_WEIGHT = 1 / 80
_CLOSED, _ENDED = 3, 3
"""Number of times that an item is written when closed, and at the end."""


class ResponseWriter:
    """Writer of one response; ``frame`` is the response without the answer's fields."""

    def __init__(self, frame: dict[str, Any], *, streams: bool) -> None:
        self._frame = frame
        self._streams = streams
        self.final: dict[str, Any] = frame
        """The whole response, after its end."""
        self._sequence = 0
        self._out: list[bytes] = []
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._waiting: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text was held back."""
        self._open: Item | None = None
        self._open_weight = self._closed_weight = 0.0
        """Costs of writing the open item, and those before it."""
        self.output: list[Item] = []

    def weight_of(self, events: Sequence[Event]) -> int:
        """Return the cost of ``take`` for these events, for ``CpuPool.run``."""
        if not self._streams or self._open is None:
            return 0
        closes = any(self._begins(each, self._open["type"]) for each in events)
        return int(_CLOSED * self._open_weight) if closes else 0

    @property
    def end_weight(self) -> int:
        together = self._open_weight + self._closed_weight
        if not self._streams:
            return int(2 * together)
        return int(_CLOSED * self._open_weight + _ENDED * together)

    def begin(self) -> bytes:
        response = self._response("in_progress", None)
        self._emit("response.created", response=response)
        self._emit("response.in_progress", response=response)
        return self._flushed()

    def take(self, events: Sequence[Event], logprobs: Logprobs = ()) -> bytes:
        """Return the events of a step's output and log-probabilities."""
        kind = None if self._open is None else self._open["type"]
        if kind in (None, "message") or any(isinstance(each, ContentDelta) for each in events):
            self._waiting += logprobs
            for each in logprobs:
                self._open_weight += _TOKEN_WEIGHT * (1 + len(each["top_logprobs"]))
        for event in events:
            match event:
                case ContentDelta(text):
                    self._write(text)
                case ReasoningDelta(text):
                    self._waiting.clear()
                    self._think(text)
                case CallBegun(_, call_id, name):
                    self._waiting.clear()
                    call = {"call_id": call_id, "name": name, "arguments": ""}
                    self._begin("function_call", **call)
                case ArgumentsDelta(_, text):
                    self._add(text)
                    self._emit_of_item("response.function_call_arguments.delta", delta=text)
        return self._flushed()

    def end(self, finish: FinishReason | None, usage: dict[str, Any]) -> bytes:
        whole = finish is FinishReason.STOP
        self._close("completed" if whole else "incomplete")
        status = "completed" if whole else "incomplete"
        self._frame["completed_at"] = int(time.time()) if whole else None
        if not whole:
            self._frame["incomplete_details"] = {"reason": "max_output_tokens"}
        self.final = self._response(status, usage)
        self._emit(f"response.{status}", response=self.final)
        return self._flushed()

    def failed(self, answer: ErrorAnswer) -> bytes:
        """Return the last event of a stream that fails."""
        self._close("incomplete")
        code = "rate_limit_exceeded" if answer.status == 429 else "server_error"
        code = "invalid_prompt" if answer.status == 400 else code
        self._frame["error"] = {"code": code, "message": answer.message}
        self._emit("response.failed", response=self._response("failed", None))
        return self._flushed()

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        return {**self._frame, "status": status, "output": list(self.output), "usage": usage}

    def _write(self, text: str) -> None:
        if self._open is None or self._open["type"] != "message":
            self._begin("message", role="assistant", content=[])
            self._emit_of_item("response.content_part.added", content_index=0, part=output_text(""))
        logprobs, self._waiting = self._waiting, []
        self._add(text)
        self._logprobs += logprobs
        self._emit_of_item(
            "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs
        )

    def _think(self, text: str) -> None:
        if self._open is None or self._open["type"] != "reasoning":
            self._begin("reasoning", summary=[], content=[])
            part = {"type": "reasoning_text", "text": ""}
            self._emit_of_item("response.content_part.added", content_index=0, part=part)
        self._add(text)
        self._emit_of_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _add(self, text: str) -> None:
        self._texts.append(text)
        self._open_weight += _TEXT_WEIGHT * len(text)

    @staticmethod
    def _begins(event: Event, kind: str) -> bool:
        """Return whether an event begins an item of a kind other than ``kind``."""
        match event:
            case ContentDelta():
                return kind != "message"
            case ReasoningDelta():
                return kind != "reasoning"
        return isinstance(event, CallBegun)

    def _begin(self, kind: str, **fields: Any) -> None:
        self._close("completed")
        item = {"id": new_id(kind), "type": kind, "status": "in_progress", **fields}
        self._open = item
        self.output.append(item)
        self._emit("response.output_item.added", output_index=len(self.output) - 1, item=item)

    def _close(self, status: str) -> None:
        item = self._open
        if item is None:
            return
        text = "".join(self._texts)
        if item["type"] == "function_call":
            item["arguments"] = text
            self._emit_of_item(
                "response.function_call_arguments.done", arguments=text, name=item["name"]
            )
        else:
            self._close_part(item, text)
        item["status"] = status
        self._emit("response.output_item.done", output_index=len(self.output) - 1, item=item)
        self._open = None
        self._texts, self._logprobs = [], []
        self._closed_weight += self._open_weight
        self._open_weight = 0.0

    def _close_part(self, item: Item, text: str) -> None:
        if item["type"] == "message":
            logprobs = [*self._logprobs, *self._waiting]
            part = output_text(text, logprobs)
            self._emit_of_item(
                "response.output_text.done", content_index=0, text=text, logprobs=logprobs
            )
        else:
            part = {"type": "reasoning_text", "text": text}
            self._emit_of_item("response.reasoning_text.done", content_index=0, text=text)
        item["content"] = [part]
        self._emit_of_item("response.content_part.done", content_index=0, part=part)

    def _emit_of_item(self, kind: str, **fields: Any) -> None:
        assert self._open is not None
        where = {"item_id": self._open["id"], "output_index": len(self.output) - 1}
        self._emit(kind, **where, **fields)

    def _emit(self, kind: str, **fields: Any) -> None:
        if not self._streams:
            return
        content = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        self._out.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(content)))

    def _flushed(self) -> bytes:
        data = b"".join(self._out)
        self._out.clear()
        return data
