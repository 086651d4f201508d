"""Read tensors that clients send as safetensors files, without torch."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from tandem.protocol.embeds import WIDTHS, PromptEmbeds
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams

NO_EMBEDS = (
    "leave it out: this server accepts prompts of embeddings only if its workers have "
    "--enable-prompt-embeds"
)


def check_embeds(
    embeds: PromptEmbeds,
    params: SamplingParams,
    *,
    param: str,
    hidden_size: int | None,
    add_special_tokens: bool | None,
) -> None:
    """Raise InvalidParameter for ``param`` unless the vectors fit ``hidden_size`` (None: not
    accepted).

    Also raises for a field that a prompt without ids cannot have. Values are not checked.
    """
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


_MOST_HEADER = 1 << 14
"""Maximum bytes of a header."""
_MAX_DIMENSIONS = 3
_MAX_VALUES = 1 << 40
_DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_TORCH_SAVE = re.compile(rb"PK\x03\x04|\x80[\x02-\x05]")
"""First bytes of a zip, which ``torch.save`` writes, and of a bare pickle."""
_CONVERT = (
    'it is in the format of torch.save; convert it with safetensors.torch.save({"prompt_embeds": '
    "tensor.contiguous()})"
)


class NotATensor(Exception):
    """The bytes are not a safetensors file of one tensor; the text has the reason."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor within the bytes of a file."""

    dtype: str
    shape: tuple[int, ...]
    values: memoryview
    """Its values, in order, little-endian."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_safetensors(data: bytes) -> SavedTensor:
    """Return the one tensor, under any name. Raises NotATensor."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 0 < size <= min(_MOST_HEADER, len(data) - 8):
        no_header = "its first 8 bytes are not the length of a header"
        raise NotATensor(_CONVERT if _TORCH_SAVE.match(data) else no_header)
    try:
        header = msgspec.json.decode(data[8 : 8 + size], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        if len(header) != 1:
            raise NotATensor(f"it holds {len(header)} tensors, not one")
        entry = msgspec.json.decode(next(iter(header.values())), type=_Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotATensor("its header is not that of a safetensors file") from error
    dtype, width = _DTYPES.get(entry.dtype, (entry.dtype[:32], 1))
    if entry.dtype not in _DTYPES:
        return SavedTensor(dtype, tuple(entry.shape[:4]), memoryview(b""))
    values = memoryview(data)[8 + size :]
    if entry.data_offsets != (0, len(values)):
        raise NotATensor("its values are not all of what follows its header")
    if _num_values(tuple(entry.shape)) * width != len(values):
        raise NotATensor("its shape is not that of its values")
    return SavedTensor(dtype, tuple(entry.shape), values)


def _num_values(shape: tuple[int, ...]) -> int:
    if len(shape) > _MAX_DIMENSIONS:
        raise NotATensor(f"it has {len(shape)} dimensions, not two")
    total = 1
    for each in shape:
        if not 0 <= each <= _MAX_VALUES:
            raise NotATensor("its shape is out of all bounds")
        total *= each
    if total > _MAX_VALUES:
        raise NotATensor("its shape is out of all bounds")
    return total


def is_tensor(value: object) -> bool:
    """Return whether ``value`` is a tensor of torch or numpy, by its attributes."""
    return all(hasattr(value, name) for name in ("shape", "dtype", "ndim"))


def of_tensor(tensor: Any, param: str) -> PromptEmbeds:
    """Return the embeddings of a torch or numpy tensor [positions, hidden_size], on any device.

    Also accepts [1, positions, hidden_size]. bfloat16 becomes float32. Raises InvalidParameter that
    names ``param``.
    """
    array = tensor
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        if str(array.dtype) == "torch.bfloat16":
            array = array.float()
        if array.layout is not None and str(array.layout) != "torch.strided":
            raise InvalidParameter(param, str(array.layout), "a dense tensor")
        array = array.numpy()
    described = f"{list(array.shape)} {array.dtype}"
    if str(array.dtype) not in WIDTHS:
        raise InvalidParameter(param, described, f"a tensor of {', '.join(WIDTHS)}")
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2:
        raise InvalidParameter(param, described, "a tensor [positions, hidden_size]")
    return PromptEmbeds(str(array.dtype), array.shape[1], array.tobytes())


_CHUNK = 1 << 16
"""Characters of base64 decoded per call, so that other threads can run. A multiple of 4."""


def decoded(text: str, param: str, *, max_bytes: int) -> bytes:
    """Return the bytes of a text in base64.

    Raises InvalidParameter that names ``param``, also for more than ``max_bytes`` of values.
    """
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

    Also accepts [1, positions, hidden_size]. Raises InvalidParameter that names ``param``. Width
    and values are not checked.
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
"""Maximum bytes of a file in addition to its values."""
