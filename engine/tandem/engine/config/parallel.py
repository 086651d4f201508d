"""Settings that spread one model over ranks."""

import math
from dataclasses import dataclass

from tandem.base.settings import check_choices, check_integer, setting
from tandem.engine.config.facts import ModelFacts
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Ranks of one worker."""

    tensor_parallel_size: int = setting(
        1,
        "Ranks that share each layer's heads, MLP and vocabulary, on CPUs. They support no "
        "hand-off and no kv_offloading_size.",
        unit="ranks",
    )

    distributed_executor_backend: str = setting(
        "auto",
        "Process of a rank. uni: the engine's; mp: a child for each, without hand-off on a GPU; "
        "auto: mp for several ranks.",
        choices=("auto", "uni", "mp"),
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_integer("tensor_parallel_size", self.tensor_parallel_size, 1)
        if self.tensor_parallel_size > 1 and self.distributed_executor_backend == "uni":
            allowed = "1 with distributed_executor_backend=uni: several ranks require mp"
            raise InvalidParameter("tensor_parallel_size", self.tensor_parallel_size, allowed)

    @property
    def in_children(self) -> bool:
        """Return whether the ranks are child processes."""
        return self.tensor_parallel_size > 1 or self.distributed_executor_backend == "mp"


def check_ranks(size: int, facts: ModelFacts, *, device: str, offloads: bool) -> None:
    """Raise InvalidParameter for a model or setting that ``size`` ranks do not support.
    ``offloads``: KV is offloaded."""
    if size == 1:
        return
    reason = _reason_for_one(facts, device=device, offloads=offloads)
    if reason is not None:
        raise InvalidParameter("tensor_parallel_size", size, f"1 {reason}")
    for name, extent, unit in _extents(facts):
        if extent % (size * unit):
            parts = f", in parts of a multiple of {unit}" if unit > 1 else ""
            allowed = f"a divisor of the model's {extent} {name}{parts}"
            raise InvalidParameter("tensor_parallel_size", size, allowed)


def _reason_for_one(facts: ModelFacts, *, device: str, offloads: bool) -> str | None:
    if device != "cpu":
        return "on a GPU, where ranks cannot exchange sums yet"
    if offloads:
        return "with kv_offloading_size, whose blocks are one rank's"
    if facts.encoder is not None:
        return f"for {facts.architecture}, an encoder"
    if KVKind.STATE in facts.kinds:
        return f"for {facts.architecture}, whose layers with states cannot be cut"
    return None


def _extents(facts: ModelFacts) -> tuple[tuple[str, int, int], ...]:
    """Return name, extent and unit of all that is cut into equal parts."""
    cut = (("key and value heads", facts.num_kv_heads, 1), ("heads", facts.num_heads, 1))
    if facts.quantization is None:
        return (*cut, *_widths(facts, 1))
    outputs, inputs = facts.quantization.units
    both = math.lcm(outputs, inputs)
    return (*cut, *_heads(facts, outputs, inputs), *_widths(facts, both))


def _heads(facts: ModelFacts, outputs: int, inputs: int) -> tuple[tuple[str, int, int], ...]:
    """Return the widths of the heads' layers, of which ranks cut outputs, or inputs of the last."""
    width, latent = facts.num_heads * facts.head_dim, facts.latent
    if latent is None:
        keys = facts.num_kv_heads * facts.head_dim
        both = math.lcm(outputs, inputs)
        return (("values of keys", keys, outputs), ("values of queries", width, both))
    values = facts.num_heads * latent.value_dim
    return (
        ("values of queries", width, outputs),
        ("values of keys and values", facts.num_heads * latent.nope_dim + values, outputs),
        ("values of attention", values, inputs),
    )


def _widths(facts: ModelFacts, unit: int) -> list[tuple[str, int, int]]:
    """Return the widths of MLPs and of experts, if layers have them."""
    mlp = ("values of an MLP (intermediate_size)", facts.intermediate_size, unit)
    if facts.experts is None:
        return [mlp]
    found = [("values of an expert", facts.experts.width, unit)]
    if facts.experts.shared_width is not None:
        found.append(("values of the shared expert", facts.experts.shared_width, unit))
    return found if len(facts.experts.layers) == facts.num_layers else [mlp, *found]
