"""Tensors and arrays of the caller's own process as prompts, of torch or numpy."""

from __future__ import annotations

from typing import Any

from tandem.protocol.embeds import WIDTHS, PromptEmbeds
from tandem.protocol.errors import InvalidParameter


def is_tensor(value: object) -> bool:
    """Return whether ``value`` is a tensor of torch or numpy, by its attributes."""
    return all(hasattr(value, name) for name in ("shape", "dtype", "ndim"))


def of_tensor(tensor: Any, param: str) -> PromptEmbeds:
    """Return the embeddings of a torch or numpy tensor [positions, hidden_size], on any device.
    Also accepts [1, positions, hidden_size]. bfloat16 becomes float32, which numpy has and which
    represents all of its values. Raises InvalidParameter that names ``param``."""
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
