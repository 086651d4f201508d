"""Tensors as clients send them, read without torch and without running a word of them.

What ``torch.save`` writes is a zip with a pickle in it, which vLLM's clients send; a file of
safetensors is the simpler form, for clients without torch. Of either, exactly one tensor is taken,
and of a pickle nothing is executed: its opcodes are a list that is read, and others are refused.
"""

from __future__ import annotations

import base64
import binascii

from tandem.protocol.embeds import WIDTHS, PromptEmbeds
from tandem.protocol.errors import InvalidParameter
from tandem.text.embeds.archive import is_archive, read_archive
from tandem.text.embeds.problem import NotATensor
from tandem.text.embeds.safe import read_safetensors

_CHUNK = 1 << 16
"""Characters of base64 that are decoded at a time; others' turns lie between. A multiple of 4."""


def decoded(text: str, param: str, *, max_bytes: int) -> bytes:
    """Bytes of a text in base64. Raises InvalidParameter that names ``param``, also for more than
    ``max_bytes`` and what a file has around its values."""
    most = max_bytes + _AROUND
    if len(text) // 4 * 3 > most:
        allowed = f"at most {max_bytes} bytes of values"
        raise InvalidParameter(param, f"{len(text)} characters of base64", allowed)
    parts = []
    try:
        for start in range(0, len(text), _CHUNK):
            part = text[start : start + _CHUNK]
            if "=" in part and start + _CHUNK < len(text):
                raise binascii.Error("padding before the end")
            parts.append(base64.b64decode(part, validate=True))
    except ValueError as error:  # binascii.Error, or characters beyond ASCII
        raise InvalidParameter(param, text, f"base64 of a saved tensor ({error})") from error
    return b"".join(parts)


def read_embeds(data: bytes, param: str, *, max_bytes: int) -> PromptEmbeds:
    """The tensor [positions, hidden_size] in ``data``, of ``max_bytes`` of values at most;
    [1, positions, hidden_size] is taken for that. Raises InvalidParameter that names ``param``.
    Whether a model takes its shape and values is not looked at."""
    try:
        found = read_archive(data) if is_archive(data) else read_safetensors(data)
    except NotATensor as error:
        allowed = f"one tensor as torch.save or safetensors writes it: {error}"
        raise InvalidParameter(param, f"{len(data)} bytes", allowed) from error
    shape = found.shape[1:] if len(found.shape) == 3 and found.shape[0] == 1 else found.shape
    described = f"{list(found.shape)} {found.dtype}"
    if found.dtype not in WIDTHS:
        raise InvalidParameter(param, described, f"a tensor of {', '.join(WIDTHS)}")
    if len(shape) != 2 or not all(shape):
        allowed = "a tensor [positions, hidden_size], one position or more"
        raise InvalidParameter(param, described, allowed)
    if len(found.values) > max_bytes:
        raise InvalidParameter(param, described, f"at most {max_bytes} bytes of values")
    return PromptEmbeds(found.dtype, shape[1], bytes(found.values))


_AROUND = 1 << 16
"""Bytes that a file may have beside the values of its tensor."""
