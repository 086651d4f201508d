"""A producer and a consumer whose blocks differ in size: the same tokens' KV lies otherwise."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import torch
from tests.kvtransfer.builders import (
    LAYOUT,
    Consumer,
    Producer,
    Switch,
    fingerprint_of,
    hash_of,
    make_key,
    only,
)

from tandem.kvtransfer import events
from tandem.protocol.card import FP8_CODES, KVLayout, blocks_for
from tandem.protocol.ids import BlockHash

(GROUP,) = LAYOUT.groups


def layout_of(block_size: int, dtype: str = "float32", **changes: int) -> KVLayout:
    """That of the other tests, with blocks of so many tokens."""
    return KVLayout(
        (msgspec.structs.replace(GROUP, block_size=block_size, dtype=dtype, **changes),)
    )


def as_tokens(kv_cache: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """The slab as [block, layer, K|V, head, token, head_dim] numbers."""
    group = layout.groups[0]
    return kv_cache.view(getattr(torch, group.dtype)).view(-1, *group.block_shape)


def kv_of(name: str, num_tokens: int, layout: KVLayout) -> torch.Tensor:
    """[layer, K|V, head, token, head_dim]: the KV of that request, whatever the blocks."""
    group = layout.groups[0]
    generator = torch.Generator().manual_seed(abs(hash_of(name)))
    layers, two, heads, _, width = group.block_shape
    wanted = torch.randn((num_tokens, layers, two, heads, width), generator=generator)
    return wanted.permute(1, 2, 3, 0, 4).to(getattr(torch, group.dtype))


def hashes_of(name: str, num_tokens: int, block_size: int) -> list[BlockHash]:
    words = [f"{name}/{block_size}/{at}" for at in range(num_tokens // block_size)]
    return [BlockHash(word.encode().ljust(16, b".")[:16]) for word in words]


class Pair:
    def __init__(
        self,
        workers,
        config,
        sizes: tuple[int, int],
        dtype: str | tuple[str, str] = "float32",
        consumer_config=None,
        **parts,
    ) -> None:
        """``dtype`` is that of both, or P's and D's; ``parts`` are for both services."""
        self.sizes = sizes
        dtypes = (dtype, dtype) if isinstance(dtype, str) else dtype
        self.layouts = tuple(map(layout_of, sizes, dtypes))
        of_model = next((each for each in dtypes if each != FP8_CODES), "float32")
        first, second = (
            {"layout": each, "fingerprint": fingerprint_of(each, of_model), **parts}
            for each in self.layouts
        )
        self.producer = workers(Producer, config, **first)
        self.consumer = workers(Consumer, consumer_config or config, **second)
        self.consumer.meet(self.producer)

    def found(self, blocks: list[int], num_tokens: int) -> torch.Tensor:
        """What D holds of so many tokens, [layer, K|V, head, token, head_dim]."""
        size, kv_cache = self.sizes[1], as_tokens(self.consumer.kv_cache, self.layouts[1])
        tokens = [kv_cache[blocks[at // size], :, :, :, at % size] for at in range(num_tokens)]
        return torch.stack(tokens, dim=3)

    def load(self, name: str, blocks: list[int], hit: int = 0) -> None:
        ready = self.consumer.wait_for(events.Ready, make_key(name))
        hashes = hashes_of(name, ready.num_tokens, self.sizes[0])
        self.consumer.service.begin_load(
            make_key(name), only(blocks), hit, ready.num_tokens, hashes
        )

    def hand_over(
        self, name: str, num_tokens: int, theirs: list[int], mine: list[int], hit: int = 0, kv=None
    ) -> None:
        """All of it, in chunks of 24 tokens, D's blocks being there from the first on."""
        key = make_key(name)
        assert self.producer.admit(key, num_tokens, self.consumer.incarnation) is None
        self.consumer.open(key, self.producer.incarnation)
        cuts = [*range(0, num_tokens, 24), num_tokens]
        spans = list(pairwise(cuts))
        kv = kv_of(name, num_tokens, self.layouts[0]) if kv is None else kv
        kv_cache = as_tokens(self.producer.kv_cache, self.layouts[0])
        self.producer.kv_cache.view(torch.uint8)[theirs] = 7  # after the last token: not of it
        self.write(kv_cache, kv, theirs)
        self.announce(name, theirs, spans[:1])
        self.load(name, mine, hit)
        self.announce(name, theirs, spans[1:])
        self.producer.end(key)
        self.consumer.wait_for((events.Loaded,), key)

    def write(self, kv_cache: torch.Tensor, kv: torch.Tensor, blocks: list[int]) -> None:
        for token in range(kv.shape[3]):
            kv_cache[blocks[token // self.sizes[0]], :, :, :, token % self.sizes[0]] = kv[
                :, :, :, token
            ]

    def announce(self, name: str, blocks: list[int], spans: list[tuple[int, int]]) -> None:
        size, service = self.sizes[0], self.producer.service
        for _, stop in spans:
            used, hashes = blocks[: blocks_for(stop, size)], hashes_of(name, stop, size)
            service.computed(make_key(name), only(used), stop, Switch(done=True), hashes)
