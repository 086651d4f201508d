"""Bodies of requests that are answered by vectors and scores; the engine checks ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from tandem.protocol.errors import InvalidParameter
from tandem.router.api.openai.bodies import hints
from tandem.router.api.openai.bodies.bounds import Body, Documents, Prompts, Texts
from tandem.router.api.openai.bodies.hints import Hint, Reading
from tandem.router.api.openai.bodies.parameters import Refused
from tandem.router.api.openai.bodies.schemas import Information, Salt

_CHATS = "inputs are texts or token ids"
_TEXT = "this server accepts text only"
_REFUSED: Mapping[str, Refused] = {
    "messages": Refused(_CHATS),
    "chat_template": Refused(_CHATS),
    "chat_template_kwargs": Refused(_CHATS, ({},)),
    "add_generation_prompt": Refused(_CHATS, (False,)),
    "continue_final_message": Refused(_CHATS, (False,)),
    "prompt_embeds": Refused(_CHATS, ([],)),
    "mm_processor_kwargs": Refused(_TEXT, ({},)),
    "media_io_kwargs": Refused(_TEXT, ({},)),
}
_FORMS: Mapping[str, Refused] = {
    "embed_dtype": Refused("values are float32", ("float32",)),
    "endianness": Refused("bytes are little-endian", ("native", "little")),
}

EncodingFormat = Literal["float", "base64"]
Task = Literal["embed", "token_embed", "classify"]


class PooledBody(Body):
    """Fields of all pooling requests."""

    REFUSED: ClassVar[Mapping[str, Refused]] = _REFUSED
    HINTS: ClassVar[Mapping[str, Hint]] = hints.POOLED

    model: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Salt | None = None
    priority: int | None = None
    timeout: float | None = None
    request_id: str | None = None
    user: Information | None = None

    def check(self, reading: Reading, prefix: str = "") -> None:
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidParameter(
                "truncation_side", self.truncation_side, "only with truncate_prompt_tokens"
            )
        super().check(reading, prefix)


class EmbeddingBody(PooledBody):
    """``POST /v1/embeddings``."""

    REFUSED: ClassVar[Mapping[str, Refused]] = {**_REFUSED, **_FORMS}
    EXAMPLE: ClassVar[Mapping[str, Any]] = {"input": ["Paris is in France.", "Rome is in Italy."]}

    input: Prompts
    encoding_format: EncodingFormat | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class PoolingBody(EmbeddingBody):
    """``POST /pooling``."""

    task: Task | None = None
    activation: bool | None = None


class ClassifyBody(PooledBody):
    """``POST /classify``."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"input": "I liked it."}

    input: Prompts
    activation: bool | None = None


class ScoreBody(PooledBody):
    """``POST /v1/score``."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {
        "text_1": "Where is Paris?",
        "text_2": ["Paris is in France.", "Rome is in Italy."],
    }

    text_1: Texts
    text_2: Texts
    activation: bool | None = None


class RerankBody(PooledBody):
    """``POST /v1/rerank``."""

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        **_REFUSED,
        "max_tokens_per_doc": Refused("use truncate_prompt_tokens"),
        "rank_fields": Refused("documents are texts", ([],)),
    }

    EXAMPLE: ClassVar[Mapping[str, Any]] = {
        "query": "Where is Paris?",
        "documents": ["Paris is in France.", "Rome is in Italy."],
        "top_n": 1,
    }

    query: str
    documents: Documents
    top_n: int | None = None
    return_documents: bool | None = None
    activation: bool | None = None


def bodies() -> list[type[Body]]:
    """Return the bodies of the document."""
    return [EmbeddingBody, PoolingBody, ClassifyBody, ScoreBody, RerankBody]
