"""Truncation of a pooled prompt that keeps the special tokens at its ends.

The hidden state of the first token (BERT) or the last one (Qwen3-Embedding) represents the prompt.
These are special tokens that the tokenizer adds around a text, so the cut is made within the text.
Called by ``InputProcessor``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
