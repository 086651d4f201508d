"""Logits processors of users: their interface, and the search for them, without torch.

A processor is a class named by ``--logits-processors module:Class``, or an entry point of the group
``tandem.logits_processors``. A request's arguments are in ``vllm_xargs``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, ClassVar

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

GROUP = "tandem.logits_processors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorContext:
    """Facts of the rank that makes a processor."""

    vocab_size: int
    max_rows: int
    """Upper bound of row numbers, exclusive."""
    device: torch.device


class LogitsProcessor(ABC):
    """Changes logits of the rows that request it, all of a step at once, on the device.

    A processor that may change the best token (``keeps_argmax`` is False) runs before the server's
    own masks, grammars, biases and penalties. These so hold in any case. Other processors run after
    these, and not at all for rows that take the best token.
    """

    ARGUMENTS: ClassVar[tuple[str, ...]]
    """Names in ``vllm_xargs`` that it reads; a request with one of them requests it."""
    keeps_argmax: ClassVar[bool] = False
    """True if the best token of a row is the same before and after."""
    looks_back: ClassVar[bool] = False
    """True if it receives each token by ``extend`` before the next is sampled. This costs the row
    the step that would run ahead."""

    def __init__(self, context: ProcessorContext) -> None:
        """Keep the context. Each rank makes one processor."""
        self.context = context

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        """Raise InvalidParameter, named ``vllm_xargs.NAME``, for a value that is not allowed."""
        return

    @abstractmethod
    def add(
        self, row: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """Add a sequence that requests it to ``row``; after a resume with an output."""

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Extend the row's output by these tokens; called only if it looks back."""
        return

    @abstractmethod
    def remove(self, row: int) -> None:
        """Forget the row's sequence."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """Change float32 [len(rows), vocabulary] in place. Nothing may wait for the device."""


class ProcessorClasses:
    """The logits processor classes of an engine."""

    def __init__(self, names: Sequence[str]) -> None:
        """Load the named classes and those of installed packages, each once. Raises
        InvalidParameter for a name without a processor."""
        found = {name: _load(name) for name in names}
        found |= {name: each for name, each in installed().items() if name not in found}
        self.classes = tuple(dict.fromkeys(found.values()))
        for first, each in enumerate(self.classes):
            for other in self.classes[:first]:
                if shared := set(each.ARGUMENTS) & set(other.ARGUMENTS):
                    allowed = f"processors with names of their own; {other.__name__} reads "
                    raise InvalidParameter(
                        "logits_processors", each.__name__, allowed + ", ".join(sorted(shared))
                    )

    def check(self, params: SamplingParams) -> None:
        for name, value in (params.extra_args or {}).items():
            if name not in self._arguments:
                known = ", ".join(self._arguments)
                allowed = f"one of {known}" if known else "none: no logits processor is loaded"
                raise InvalidParameter(f"vllm_xargs.{name}", value, allowed)
        for each in self.asked_by(params):
            each.check(params)

    def asked_by(self, params: SamplingParams) -> list[type[LogitsProcessor]]:
        given = params.extra_args or {}
        return [each for each in self.classes if any(name in given for name in each.ARGUMENTS)]

    @cached_property
    def _arguments(self) -> tuple[str, ...]:
        return tuple(sorted(name for each in self.classes for name in each.ARGUMENTS))


@cache
def installed() -> dict[str, type[LogitsProcessor]]:
    """Return processors of installed packages, searched once. Raises InvalidParameter."""
    found = {}
    for entry in entry_points(group=GROUP):
        try:
            found[entry.value] = _checked(entry.name, entry.load())
        except (ImportError, AttributeError) as error:
            allowed = f"an entry point that can be loaded: {error}"
            raise InvalidParameter(GROUP, entry.value, allowed) from error
    return found


def _load(name: str) -> type[LogitsProcessor]:
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise InvalidParameter("logits_processors", name, "module:Class")
    try:
        return _checked(name, getattr(import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        allowed = f"module:Class that can be imported: {error}"
        raise InvalidParameter("logits_processors", name, allowed) from error


def _checked(name: str, found: object) -> type[LogitsProcessor]:
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        allowed = f"a subclass of {LogitsProcessor.__module__}.LogitsProcessor"
        raise InvalidParameter("logits_processors", name, allowed)
    if not getattr(found, "ARGUMENTS", ()):
        raise InvalidParameter("logits_processors", name, "a class with ARGUMENTS, one at least")
    return found
