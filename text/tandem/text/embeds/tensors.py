"""A tensor or an array of the caller's own process as a prompt, whichever library made it."""

from __future__ import annotations

from typing import Any

from tandem.protocol.embeds import WIDTHS, PromptEmbeds
from tandem.protocol.errors import InvalidParameter


def is_tensor(value: object) -> bool:
    """Whether it is torch's or numpy's, by what it has."""
    return all(hasattr(value, name) for name in ("shape", "dtype", "ndim"))


def of_tensor(tensor: Any, param: str) -> PromptEmbeds:
    """[positions, hidden_size] of torch or numpy, on any device; [1, positions, hidden_size] is
    taken for that. bfloat16 becomes float32, which numpy has and which holds all of its values.
    Raises InvalidParameter that names ``param``."""
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
