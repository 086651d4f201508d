"""Cutting a prompt that is pooled: a vector is of its ends, too.

The state of a first token (BERT) or of a last one (Qwen3-Embedding) stands for the prompt; these
are special tokens that the tokenizer puts around a text, and a cut within the text leaves them.
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
    """``keep`` of ``ids``, the special tokens at both ends among them where they fit, and where the
    second text begins now (None if nothing of it is left).

    Args:
        ids: more than ``keep`` of them.
        keep: at least 1.
        second_text_at: its first token, of a pair whose texts are told apart.
        special_ids: of the tokenizer.
        from_left: whether the beginning of the text is dropped, or its end.
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
