"""Check of token ids against a vocabulary without a Python loop: prompts have thousands."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.protocol.errors import InvalidParameter


def check_token_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidParameter for the first of ``ids`` that is not from 0 to ``vocab_size`` - 1."""
    try:
        msgspec.convert(ids, _list_of(vocab_size))
    except msgspec.ValidationError:
        for each in ids:
            if not 0 <= each < vocab_size:
                allowed = f"token ids from 0 to {vocab_size - 1}"
                raise InvalidParameter(param, each, allowed) from None


@lru_cache(maxsize=16)
def _list_of(vocab_size: int) -> Any:
    return list[Annotated[int, Meta(ge=0, lt=vocab_size)]]
