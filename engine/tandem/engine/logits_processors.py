"""Logits processors of others: their interface, and how they are found.

A processor is a class that is named by ``--logits-processors module:Class``, or that an installed
package offers as an entry point of the group ``tandem.logits_processors``. Each rank makes one of
it; what a request says to it comes in ``vllm_xargs``, whose names the class declares. No torch is
imported here: the plan asks the classes what they take.
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
"""Entry points of installed packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorContext:
    """What a processor is told of the rank that makes it."""

    vocab_size: int
    max_rows: int
    """Rows are numbered below it."""
    device: torch.device


class LogitsProcessor(ABC):
    """Changes logits of the rows that ask for it, all of a step at once, on the device.

    One that changes which token is the best (``keeps_argmax`` is False) runs before all that the
    server itself does: masks, grammars, biases and penalties hold whatever it does. One that does
    not runs behind them, and not at all for rows that take the best token.
    """

    ARGUMENTS: ClassVar[tuple[str, ...]]
    """Names in ``vllm_xargs`` that it reads; a request with one of them asks for it."""
    keeps_argmax: ClassVar[bool] = False
    """Whether the best token of a row is the same before and after."""
    looks_back: ClassVar[bool] = False
    """Whether it is told each token by ``extend`` before the next is drawn, which costs the row
    the step that would run ahead."""

    def __init__(self, context: ProcessorContext) -> None:
        """Made once by each rank."""
        self.context = context

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        """Raise InvalidParameter, named ``vllm_xargs.NAME``, for a value that is not allowed."""
        return

    @abstractmethod
    def add(
        self, row: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """A sequence that asks for it has come to ``row``; after a resume with an output."""

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """The row's output went on by these tokens; only where it looks back."""
        return

    @abstractmethod
    def remove(self, row: int) -> None:
        """The row is free."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """Change float32 [len(rows), vocabulary] in place. Nothing may wait for the device."""


class ProcessorClasses:
    """The classes that an engine has."""

    def __init__(self, names: Sequence[str]) -> None:
        """Those that are named, then those of installed packages, each once. Raises
        InvalidParameter for a name that is none."""
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
        """Raise InvalidParameter for what a request says to nobody here, or wrongly."""
        for name, value in (params.extra_args or {}).items():
            if name not in self._arguments:
                known = ", ".join(self._arguments)
                allowed = f"one of {known}" if known else "none: no logits processor is loaded"
                raise InvalidParameter(f"vllm_xargs.{name}", value, allowed)
        for each in self.asked_by(params):
            each.check(params)

    def asked_by(self, params: SamplingParams) -> list[type[LogitsProcessor]]:
        """Those that a request asks for."""
        given = params.extra_args or {}
        return [each for each in self.classes if any(name in given for name in each.ARGUMENTS)]

    @cached_property
    def _arguments(self) -> tuple[str, ...]:
        return tuple(sorted(name for each in self.classes for name in each.ARGUMENTS))


@cache
def installed() -> dict[str, type[LogitsProcessor]]:
    """What installed packages offer, looked for once in a process. Raises InvalidParameter."""
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
