"""Groups of layers whose KV shares the blocks of one pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tandem.engine.config.facts import ModelFacts
from tandem.protocol.card import KVGroup, KVKind

_ATTENDED = (KVKind.FULL, KVKind.LATENT, KVKind.WINDOW)


class LayerGroup(NamedTuple):
    """One group of the layout and its layers, in the order of their KV in a block."""

    group: KVGroup
    layers: tuple[int, ...]


def layer_groups(
    facts: ModelFacts, *, block_size: int, dtype: str, ranks: int = 1
) -> tuple[LayerGroup, ...]:
    """Return the groups of a model: full attention, then latents, windows and states.

    Blocks have one size, so layers of a kind are cut into groups of equally many layers: as many as
    the smaller kind of attention has. A state's group has one layer. An encoder has one group
    without layers.
    """
    kinds = facts.kinds
    layers = {kind: tuple(i for i, each in enumerate(kinds) if each is kind) for kind in KVKind}
    sizes = [len(layers[kind]) for kind in _ATTENDED if layers[kind]]
    each = min(sizes, default=0)

    def group(kind: KVKind, count: int) -> KVGroup:
        heads, size, dtype_of = facts.num_kv_heads // ranks, facts.head_dim, dtype
        if kind is KVKind.STATE and facts.linear is not None:
            heads, size = facts.linear.num_value_heads // ranks, facts.linear.state_size
            dtype_of = "float32"
        if kind is KVKind.LATENT and facts.latent is not None:
            heads, size = 1, facts.latent.width
        return KVGroup(
            num_layers=count,
            num_kv_heads=heads,
            head_dim=size,
            block_size=block_size,
            dtype=dtype_of,
            kind=kind,
            span=facts.sliding_window if kind is KVKind.WINDOW else None,
        )

    def of(kind: KVKind, most: int) -> Iterator[LayerGroup]:
        for at in range(0, len(layers[kind]), max(1, most)):
            some = layers[kind][at : at + most]
            yield LayerGroup(group(kind, len(some)), some)

    found = (*(some for kind in _ATTENDED for some in of(kind, each)), *of(KVKind.STATE, 1))
    return found or (LayerGroup(group(KVKind.FULL, 0), ()),)
