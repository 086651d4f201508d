"""Parameters that OpenAI or vLLM know and this server does not do.

One of them is accepted with a value that asks for nothing, which is what clients send by default,
and is refused by name with any other: an answer never lacks silently what was asked for. The page
docs/http.md lists them all; ``schemas`` holds those that have an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.protocol.errors import InvalidParameter
from tandem.router.openai.written import written


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a parameter is refused, and the values (null is always one) that ask for nothing."""

    why: str
    neutral: tuple[object, ...] = ()

    def check(self, name: str, value: object) -> None:
        """Raise InvalidParameter unless ``value`` asks for nothing."""
        if value is None or any(_same(value, each) for each in self.neutral):
            return
        raise InvalidParameter(name, value, f"{self._allowed()}: {self.why}")

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the values that are accepted."""
        return {"enum": [*self.neutral, None], "description": f"No effect: {self.why}."}

    def _allowed(self) -> str:
        return " or ".join(map(written, self.neutral)) or "leave it out"


def _same(value: object, other: object) -> bool:
    """Equality in which true is not 1, and 1.0 is."""
    return isinstance(value, bool) is isinstance(other, bool) and value == other


_STRUCTURED = "ask for structured_outputs or response_format"
_TOOLS = "ask for tools and tool_choice"
_TEXT = "this server takes and gives text alone"
_BEAMS = "beam search is not available"

STREAM_OPTIONS: Mapping[str, Refused] = {
    "include_obfuscation": Refused("chunks are not padded", (False,)),
}

RESPONSE_FORMAT: Mapping[str, Refused] = {
    name: Refused(_STRUCTURED) for name in ("schema", "grammar", "tags")
}

STRUCTURED_OUTPUTS: Mapping[str, Refused] = {
    "disable_additional_properties": Refused("say it in the schema", (False,)),
}

GENERATION: Mapping[str, Refused] = {
    "store": Refused("answers are not stored", (False,)),
    "service_tier": Refused("there is one tier", ("auto", "default")),
    "use_beam_search": Refused(_BEAMS, (False,)),
    "length_penalty": Refused(_BEAMS, (1.0,)),
    "watermarking": Refused("tokens are not watermarked", (False,)),
    "logprob_token_ids": Refused("ask for the best tokens by their number"),
    "return_tokens_as_token_ids": Refused("ask for return_token_ids", (False,)),
    "return_token_offsets": Refused("not available", (False,)),
    "return_mm_kwargs": Refused(_TEXT, (True,)),
    "routed_experts_prompt_start": Refused("experts are not told", (0,)),
    "stream_interval": Refused("each step's tokens are a chunk", (1,)),
    "kv_transfer_params": Refused("the router alone decides where KV goes", ({},)),
    "ec_transfer_params": Refused(_TEXT, ({},)),
    "repetition_detection": Refused("repetition does not end an answer"),
    "structural_tag": Refused("ask for structured_outputs.structural_tag"),
    "guided_json": Refused("ask for structured_outputs.json"),
    "guided_regex": Refused("ask for structured_outputs.regex"),
    "guided_choice": Refused("ask for structured_outputs.choice"),
    "guided_grammar": Refused("ask for structured_outputs.grammar"),
    "guided_json_object": Refused("ask for structured_outputs.json_object", (False,)),
    "guided_decoding_backend": Refused(_STRUCTURED),
    "guided_whitespace_pattern": Refused("ask for structured_outputs.whitespace_pattern"),
    "mm_processor_kwargs": Refused(_TEXT, ({},)),
    "media_io_kwargs": Refused(_TEXT, ({},)),
}
"""Of chats and completions."""

CHAT: Mapping[str, Refused] = {
    **GENERATION,
    "functions": Refused(_TOOLS, ([],)),
    "function_call": Refused(_TOOLS, ("none", "auto")),
    "modalities": Refused(_TEXT, (["text"],)),
    "audio": Refused(_TEXT),
    "web_search_options": Refused("this server searches nothing"),
    "moderation": Refused("answers are not moderated"),
    "prediction": Refused("predicted outputs are not available"),
    "prompt_cache_options": Refused("prefixes are cached for all alike", ({},)),
    "prompt_cache_retention": Refused("prefixes are cached while there is room", ("in_memory",)),
    "verbosity": Refused("say it in a message", ("medium",)),
    "thinking": Refused("see reasoning_effort and chat_template_kwargs"),
    "best_of": Refused("ask for n", (1,)),
    "prompt_embeds": Refused("chats are messages; /v1/completions takes it", ([],)),
}

COMPLETION: Mapping[str, Refused] = {
    **GENERATION,
    "thinking_token_budget": Refused("texts are continued, thoughts are told in chats", (-1,)),
    "suffix": Refused("text is continued, never filled in", ("",)),
}

_NO_TOOLS = "tools are functions that the client runs"

RESPONSE_TEXT: Mapping[str, Refused] = {"verbosity": Refused("say it in a message", ("medium",))}

RESPONSE_REASONING: Mapping[str, Refused] = {
    "summary": Refused("reasoning is given whole, as the model wrote it", ("auto",)),
    "generate_summary": Refused("reasoning is given whole, as the model wrote it", ("auto",)),
    "context": Refused("the chat template decides what of earlier thoughts is read", ("auto",)),
    "mode": Refused("there is one", ("standard",)),
}

RESPONSE_TOOL: Mapping[str, Refused] = {
    "allowed_callers": Refused(_NO_TOOLS, (["direct"],)),
    "async": Refused(_NO_TOOLS, (False,)),
    "defer_loading": Refused("all tools are told at once", (False,)),
    "output_schema": Refused("results of calls are texts"),
}

RESPONSE_ITEM: Mapping[str, Refused] = {
    "async": Refused(_NO_TOOLS, (False,)),
    "caller": Refused(_NO_TOOLS),
    "encrypted_content": Refused("reasoning is not encrypted"),
    "name": Refused("a result goes by its call_id"),
    "namespace": Refused(_NO_TOOLS),
    "phase": Refused("answers have one"),
}

RESPONSES: Mapping[str, Refused] = {
    "access_programs": Refused("there is one"),
    "background": Refused("answers come on the connection that asks", (False,)),
    "context_management": Refused("see truncation", ([],)),
    "conversation": Refused("see previous_response_id"),
    "image": Refused(_TEXT),
    "max_tool_calls": Refused("this server runs no tools of its own"),
    "moderation": Refused("answers are not moderated"),
    "prompt": Refused("prompt templates are not stored"),
    "prompt_cache_options": Refused("prefixes are cached for all alike", ({},)),
    "prompt_cache_retention": Refused("prefixes are cached while there is room", ("in_memory",)),
    "service_tier": Refused("there is one tier", ("auto", "default")),
    "stream_options": Refused(
        "events are not padded, and the last one tells usage",
        (
            *({}, {"include_obfuscation": False}, {"include_usage": True}),
            {"include_obfuscation": False, "include_usage": True},
        ),
    ),
}

TOKENIZE: Mapping[str, Refused] = {
    "mm_processor_kwargs": Refused(_TEXT, ({},)),
    "media_io_kwargs": Refused(_TEXT, ({},)),
}
