"""Hashes of one prompt's blocks, computed once for each fingerprint that is up.

Workers of another block size or revision have a fingerprint of their own. The caller's hashes are
of one of them. The others' take 0.15 us a token, too long for the loop with a long prompt.
``Placing`` therefore has the missing ones computed outside the loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.protocol.hashing import hash_blocks, root_hash
from tandem.protocol.ids import BlockHash
from tandem.protocol.requests import EngineCoreRequest
from tandem.router.workers.worker import Worker

Hashes = tuple[BlockHash, ...]

_TOKEN = 2
"""Items of ``Beside.run`` for the hashing time of a token."""
_VECTOR_BYTES = 64
"""Bytes of embeddings for the time of one item."""


class PromptHashes:
    """Hashes of one request. ``of`` and ``lacking`` in the loop, ``compute`` anywhere."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self._request = request
        self._known: dict[str, Hashes] = {}

    def of(self, fingerprint: str, block_size: int) -> Hashes:
        """Return the hashes of the prompt's full blocks; compute missing ones at once."""
        known = self._find(fingerprint, block_size)
        if known is None:
            known = self._known[fingerprint] = self._compute(fingerprint, block_size)
        return known

    def lacking(self, workers: Iterable[Worker]) -> dict[str, int]:
        """Return fingerprints of workers without known hashes, with their block sizes."""
        return {
            worker.fingerprint: worker.card.block_size
            for worker in workers
            if self._find(worker.fingerprint, worker.card.block_size) is None
        }

    def weight(self, lacking: dict[str, int]) -> int:
        """Return the time of ``compute``, in items of ``Beside.run``."""
        embeds = self._request.prompt_embeds
        vectors = 0 if embeds is None else len(embeds.values) // _VECTOR_BYTES
        return len(lacking) * (_TOKEN * len(self._request.prompt_token_ids) + vectors)

    def compute(self, lacking: dict[str, int]) -> dict[str, Hashes]:
        """Return the hashes under each of these fingerprints."""
        return {name: self._compute(name, block_size) for name, block_size in lacking.items()}

    def learn(self, computed: dict[str, Hashes]) -> None:
        """Add computed hashes."""
        self._known |= computed

    def _root(self, fingerprint: str, block_size: int) -> BlockHash:
        request = self._request
        return root_hash(
            fingerprint=fingerprint,
            block_size=block_size,
            adapter=request.adapter,
            salt=request.cache_salt,
        )

    def _compute(self, fingerprint: str, block_size: int) -> Hashes:
        request, root = self._request, self._root(fingerprint, block_size)
        prompt, embeds = request.prompt_token_ids, request.prompt_embeds
        return tuple(hash_blocks(root, prompt, block_size, embeds))

    def _find(self, fingerprint: str, block_size: int) -> Hashes | None:
        """Return known hashes, or the caller's if they are of this fingerprint: a chain agrees
        wholly or not at all."""
        known = self._known.get(fingerprint)
        if known is not None:
            return known
        request = self._request
        given, prompt = request.block_hashes, request.prompt_token_ids
        if not given or len(given) != len(prompt) // block_size:
            return None
        root = self._root(fingerprint, block_size)
        if [given[0]] != hash_blocks(root, prompt[:block_size], block_size, request.prompt_embeds):
            return None
        self._known[fingerprint] = given
        return given
