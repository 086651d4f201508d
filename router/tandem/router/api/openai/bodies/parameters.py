"""Parameters of OpenAI or vLLM that this server does not support.

The neutral value is accepted; others are refused, so an answer never lacks what was requested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.protocol.errors import InvalidParameter
from tandem.router.http.errors import written


@dataclass(frozen=True, slots=True)
class Refused:
    """Reason of a refusal, and the neutral values besides null."""

    why: str
    neutral: tuple[object, ...] = ()

    def check(self, name: str, value: object) -> None:
        if value is None or any(same(value, each) for each in self.neutral):
            return
        raise InvalidParameter(name, value, f"{self._allowed()}: {self.why}")

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of accepted values."""
        return {"enum": [*self.neutral, None], "description": f"No effect: {self.why}."}

    def _allowed(self) -> str:
        return " or ".join(map(written, self.neutral)) or "leave it out"


def same(value: object, other: object) -> bool:
    """Return equality in which true is not 1, and 1.0 is."""
    return isinstance(value, bool) is isinstance(other, bool) and value == other


_STRUCTURED = "use structured_outputs or response_format"
_TOOLS = "use tools and tool_choice"
_TEXT = "this server accepts and returns text only"
_BEAMS = "beam search is not available"

RESPONSE_FORMAT: Mapping[str, Refused] = {
    name: Refused(_STRUCTURED) for name in ("schema", "grammar", "tags")
}

STRUCTURED_OUTPUTS: Mapping[str, Refused] = {
    "disable_additional_properties": Refused("set it in the schema", (False,)),
}

GENERATION: Mapping[str, Refused] = {
    "use_beam_search": Refused(_BEAMS, (False,)),
    "length_penalty": Refused(_BEAMS, (1.0,)),
    "watermarking": Refused("tokens are not watermarked", (False,)),
    "logprob_token_ids": Refused("set the number of best tokens"),
    "return_tokens_as_token_ids": Refused("use return_token_ids", (False,)),
    "return_token_offsets": Refused("not available", (False,)),
    "return_mm_kwargs": Refused(_TEXT, (True,)),
    "routed_experts_prompt_start": Refused("experts are not reported", (0,)),
    "stream_interval": Refused("each step's tokens are a chunk", (1,)),
    "kv_transfer_params": Refused("the router places KV", ({},)),
    "ec_transfer_params": Refused(_TEXT, ({},)),
    "repetition_detection": Refused("repetition does not end an answer"),
    "structural_tag": Refused("use structured_outputs.structural_tag"),
    "guided_json": Refused("use structured_outputs.json"),
    "guided_regex": Refused("use structured_outputs.regex"),
    "guided_choice": Refused("use structured_outputs.choice"),
    "guided_grammar": Refused("use structured_outputs.grammar"),
    "guided_json_object": Refused("use structured_outputs.json_object", (False,)),
    "guided_decoding_backend": Refused("use structured_outputs.backend"),
    "guided_whitespace_pattern": Refused("use structured_outputs.whitespace_pattern"),
    "mm_processor_kwargs": Refused(_TEXT, ({},)),
    "media_io_kwargs": Refused(_TEXT, ({},)),
}

CHAT: Mapping[str, Refused] = {
    **GENERATION,
    "functions": Refused(_TOOLS, ([],)),
    "function_call": Refused(_TOOLS, ("none", "auto")),
    "modalities": Refused(_TEXT, (["text"],)),
    "audio": Refused(_TEXT),
    "moderation": Refused("answers are not moderated"),
    "thinking": Refused("see reasoning_effort and chat_template_kwargs"),
    "best_of": Refused("use n", (1,)),
    "prompt_embeds": Refused("/v1/completions accepts it", ([],)),
}

COMPLETION: Mapping[str, Refused] = {
    **GENERATION,
    "thinking_token_budget": Refused("only chats have reasoning", (-1,)),
    "suffix": Refused("text is continued, not filled in", ("",)),
}

_NO_TOOLS = "tools are functions that the client runs"

RESPONSE_REASONING: Mapping[str, Refused] = {
    "context": Refused("the chat template selects earlier reasoning", ("auto",)),
    "mode": Refused("there is only this mode", ("standard",)),
}

RESPONSE_TOOL: Mapping[str, Refused] = {
    "allowed_callers": Refused(_NO_TOOLS, (["direct"],)),
    "async": Refused(_NO_TOOLS, (False,)),
}

RESPONSE_ITEM: Mapping[str, Refused] = {
    "async": Refused(_NO_TOOLS, (False,)),
    "name": Refused("a result is identified by call_id"),
}

RESPONSES: Mapping[str, Refused] = {
    "access_programs": Refused("not available"),
    "background": Refused("answers are sent on the connection of the request", (False,)),
    "context_management": Refused("see truncation", ([],)),
    "conversation": Refused("see previous_response_id"),
    "image": Refused(_TEXT),
    "moderation": Refused("answers are not moderated"),
    "prompt": Refused("prompt templates are not stored"),
}

TOKENIZE: Mapping[str, Refused] = {
    "mm_processor_kwargs": Refused(_TEXT, ({},)),
    "media_io_kwargs": Refused(_TEXT, ({},)),
}
