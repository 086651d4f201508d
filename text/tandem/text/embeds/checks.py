"""Checks of a request with a prompt of embeddings, the same in every process."""

from __future__ import annotations

from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams

NO_EMBEDS = (
    "leave it out: this server takes prompts of embeddings only where its router and its workers "
    "have --enable-prompt-embeds"
)


def check_embeds(
    embeds: PromptEmbeds,
    params: SamplingParams,
    *,
    param: str,
    hidden_size: int | None,
    add_special_tokens: bool | None,
) -> None:
    """Raise InvalidParameter for ``param`` unless the vectors fit ``hidden_size`` (None: no
    embeddings are accepted). Also raises for a field that a prompt without ids cannot have. Values
    are not checked."""
    if hidden_size is None:
        raise InvalidParameter(param, embeds.shape_text, NO_EMBEDS)
    embeds.verify_shape(param, hidden_size)
    for name, value in (
        ("prompt_logprobs", params.prompt_logprobs),
        ("add_special_tokens", add_special_tokens or None),
    ):
        if value is not None:
            raise InvalidParameter(name, value, f"none with {param}, which has no token ids")


def kept_embeds(embeds: PromptEmbeds, kept: int | None, *, from_left: bool) -> PromptEmbeds:
    """Return ``kept`` vectors, dropping the rest on the left or the right; None keeps all."""
    count = embeds.num_tokens
    if kept is None or kept >= count:
        return embeds
    first = count - kept if from_left else 0
    return embeds.cut(first, first + kept)
