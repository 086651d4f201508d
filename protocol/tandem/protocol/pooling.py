"""How a request without tokens is answered: one vector made of its prompt's hidden states."""

from enum import StrEnum

import msgspec

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams


class PoolingType(StrEnum):
    """Which hidden states (behind the model's last norm) the vector is made of; users may write its
    word."""

    LAST = "last"
    """That of the prompt's last token."""
    MEAN = "mean"
    """The mean over all of the prompt's tokens. Nothing of it comes from the prefix cache, which
    keeps no hidden states."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is wanted instead of tokens."""

    pooling_type: PoolingType = PoolingType.LAST
    normalize: bool = True
    """Whether the vector has length one."""

    def verify(self) -> "PoolingParams":
        """These with their type as a PoolingType. Raises InvalidParameter naming the field."""
        if self.pooling_type not in tuple(PoolingType):
            allowed = f"one of {', '.join(PoolingType)}"
            raise InvalidParameter("pooling_type", self.pooling_type, allowed)
        if not isinstance(self.normalize, bool):
            raise InvalidParameter("normalize", self.normalize, "true or false")
        return msgspec.structs.replace(self, pooling_type=PoolingType(self.pooling_type))


NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
"""The ``params`` of a request that is pooled, whatever their seed: nothing is drawn."""
