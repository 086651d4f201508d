"""Read tensors that clients send as safetensors files, without torch."""

from __future__ import annotations

import base64
import binascii

from tandem.protocol.embeds import WIDTHS, PromptEmbeds
from tandem.protocol.errors import InvalidParameter
from tandem.text.embeds.safe import NotATensor, read_safetensors

_CHUNK = 1 << 16
"""Characters of base64 decoded at a time, between other threads' turns. A multiple of 4."""


def decoded(text: str, param: str, *, max_bytes: int) -> bytes:
    """Return the bytes of a text in base64. Raises InvalidParameter that names ``param``, also for
    more than ``max_bytes`` and the overhead of a file."""
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
    """Return the tensor [positions, hidden_size] in ``data``, of at most ``max_bytes`` of values.

    A batch of one, [1, positions, hidden_size], is accepted. Raises InvalidParameter that names
    ``param``. The caller checks the width and the values.
    """
    try:
        found = read_safetensors(data)
    except NotATensor as error:
        allowed = f"one tensor in a safetensors file: {error}"
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
"""Bytes that a file may have in addition to the values of its tensor."""
