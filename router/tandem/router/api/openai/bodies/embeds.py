"""Prompts of embeddings in bodies: whether they are accepted, their bounds, their parsing.

They are kept as long as their request may be sent again, so their total is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tandem.llm.cpu_pool import CpuPool
from tandem.protocol.errors import InvalidParameter, Refusal, RefusalCode, RequestRefused
from tandem.router.config import RouterConfig
from tandem.router.http.held_bytes import FREE_FACTOR
from tandem.router.tenant import tenant_id
from tandem.text.embeds import NO_EMBEDS, decoded, read_embeds
from tandem.text.prompts import EmbedsPrompt

NAME = "prompt_embeds"


@dataclass(slots=True)
class EmbedsIntake:
    """Limits of an app."""

    accepted: Callable[[], bool] = lambda: False
    """Returns whether a worker accepts prompts of embeddings, or none is known yet."""
    max_bytes: int = 16 << 20
    """Maximum bytes of one prompt's values."""
    max_held_bytes: int = 512 << 20
    """Maximum bytes of all prompts; a single one is always accepted."""
    held_bytes: int = 0
    _by_tenant: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, config: RouterConfig, accepted: Callable[[], bool]) -> EmbedsIntake:
        return cls(
            accepted,
            config.max_prompt_embeds_bytes,
            config.max_held_embeds_bytes,
        )

    @contextmanager
    def holding(self, given: Sequence[str]) -> Iterator[None]:
        """Reserve room for texts in base64 and their values during the block.

        Raises InvalidParameter if none are accepted, RequestRefused (capacity) without room.
        """
        if given and not self.accepted():
            raise InvalidParameter(NAME, given[0] if len(given) == 1 else list(given), NO_EMBEDS)
        size = sum(map(len, given)) // 4 * 3
        tenant = tenant_id()
        if size and self.held_bytes and not self._has_room(tenant, size):
            message = f"{self.held_bytes} bytes of {NAME} are held; with {size} more they are"
            message = f"{message} over {self.max_held_bytes}, or over the part of this client"
            raise RequestRefused(Refusal(code=RefusalCode.CAPACITY, message=message))
        self._hold(tenant, size)
        try:
            yield
        finally:
            self._hold(tenant, -size)

    def _has_room(self, tenant: str, size: int) -> bool:
        """Return whether ``size`` more bytes may be held; some are left to other tenants."""
        free = self.max_held_bytes - self.held_bytes - size
        return free >= 0 and (not tenant or self._by_tenant[tenant] + size <= FREE_FACTOR * free)

    def _hold(self, tenant: str, size: int) -> None:
        self.held_bytes += size
        self._by_tenant[tenant] += size
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    async def read(self, given: list[str], cpu_pool: CpuPool) -> list[EmbedsPrompt]:
        """Return the prompts; each text is released after it. Raises InvalidParameter."""
        several = len(given) > 1
        prompts: list[EmbedsPrompt] = []
        given.reverse()
        while given:
            text = given.pop()
            param = f"{NAME}[{len(prompts)}]" if several else NAME
            prompts.append(await cpu_pool.run(len(text), self._prompt, text, param))
        return prompts

    def _prompt(self, text: str, param: str) -> EmbedsPrompt:
        data = decoded(text, param, max_bytes=self.max_bytes)
        return EmbedsPrompt(read_embeds(data, param, max_bytes=self.max_bytes), param)
