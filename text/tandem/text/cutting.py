"""Truncation of a pooled prompt that keeps the special tokens at its ends.

The hidden state of the first token (BERT) or the last one (Qwen3-Embedding) represents the prompt.
These are special tokens that the tokenizer adds around a text, so the cut is made within the text.
Called by ``InputProcessor``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tandem.protocol.sampling import SamplingParams
from tandem.text.errors import ContextLengthExceeded
from tandem.text.tokenizer import Tokenizer

BYTES_A_TOKEN = 2
"""Bytes per token below which a text's mean is rare: prose has three to five."""


def refuse_oversized(
    text: str, tokenizer: Tokenizer, max_model_len: int, params: SamplingParams, *, param: str
) -> None:
    """Raise ContextLengthExceeded for a text that no tokenization makes short enough, before it is
    tokenized. If a tokenizer does not represent all bytes, it may drop characters: then nothing is
    checked."""
    if len(text) <= 4 * max_model_len or not tokenizer.spells_bytes:
        return
    fewest = -(-len(text) // tokenizer.longest_token)
    if fewest > max_model_len:
        raise ContextLengthExceeded(
            param,
            num_prompt_tokens=fewest,
            max_tokens=params.max_tokens,
            max_model_len=max_model_len,
            at_least=True,
        )


def seems_to_fit(text: str, params: SamplingParams, max_model_len: int) -> bool:
    """Return whether a text has a token and probably fits next to what ``params`` ask for.
    Remaining cases are decided when it is tokenized."""
    room = max_model_len - max(params.max_tokens or 1, params.min_tokens)
    if room < 1 or not text.strip():
        return False
    try:
        return len(text.encode()) <= BYTES_A_TOKEN * room
    except UnicodeEncodeError:  # no tokenizer takes it
        return False


def cut_within_ends(
    ids: list[int],
    keep: int,
    second_text_at: int | None,
    special_ids: Collection[int],
    *,
    from_left: bool,
) -> tuple[list[int], int | None]:
    """Return ``keep`` of ``ids``, including the special tokens at both ends if they fit. Also
    return the new start of the second text (None if nothing of it is left).

    Args:
        ids: more than ``keep`` of them.
        keep: at least 1.
        second_text_at: its first token, of a pair whose texts have different token types.
        special_ids: of the tokenizer.
        from_left: True drops the beginning of the text, False its end.
    """
    head, tail = _leading(ids, special_ids), _leading(ids[::-1], special_ids)
    if head + tail >= keep:
        head = tail = 0
    inner = ids[head : len(ids) - tail]
    dropped = len(ids) - keep
    if from_left:
        cut = [*ids[:head], *inner[dropped:], *ids[len(ids) - tail :]]
    else:
        cut = [*ids[:head], *inner[: len(inner) - dropped], *ids[len(ids) - tail :]]
    if second_text_at is None:
        return cut, None
    at = max(second_text_at - dropped, head) if from_left else min(second_text_at, keep - tail)
    return cut, at if 0 < at < keep else None


def _leading(ids: Sequence[int], special_ids: Collection[int]) -> int:
    count = 0
    while count < len(ids) and ids[count] in special_ids:
        count += 1
    return count
