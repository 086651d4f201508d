"""Seeds for requests that bring none: the router always gives one, an offline caller may not."""

import msgspec

from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SEED_BITS, seeded

_STEP = 0x9E3779B97F4A7C15
"""An odd number near 2**64 over the golden ratio: multiples of it spread over all seeds."""


class SeedSource:
    """Seeds that are the same in each run of the same requests, and all different."""

    def __init__(self, seed: int) -> None:
        self._next = seed * _STEP

    def seeded(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request with a seed."""
        if request.params.seed is not None:
            return request
        self._next += _STEP
        params = seeded(request.params, self._next % 2**SEED_BITS)
        return msgspec.structs.replace(request, params=params)
