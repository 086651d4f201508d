"""Prompts given as embeddings instead of token ids, as bytes: routers have no numpy.

Exponents are checked by arithmetic of long integers.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

import msgspec

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.hashing import DIGEST_BYTES, id_bytes
from tandem.protocol.ids import BlockHash

PLACEHOLDER = 0
"""Token id that stands for each embedding."""
MOST_BYTES = 48 << 20
"""Maximum bytes of one prompt's values; a frame has more."""
MAX_MAGNITUDE = 32_768
"""Exclusive bound of magnitudes; float16 overflows at twice this bound."""
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a value, by dtype."""
_SLICE = 1 << 16
_MANTISSA_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}
_EXPONENT_BITS = {"float32": 8, "float16": 5, "bfloat16": 8}


class PromptEmbeds(msgspec.Struct, frozen=True, array_like=True):
    """One vector for each position of a prompt. Implements PromptContent."""

    dtype: str
    hidden_size: int
    values: bytes
    """[positions, hidden_size], rows one after the other, little-endian."""

    def __repr__(self) -> str:
        return f"PromptEmbeds({self.shape_text})"

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * WIDTHS[self.dtype]

    @property
    def num_tokens(self) -> int:
        """Return the number of positions of the prompt."""
        return len(self.values) // self.row_bytes

    @property
    def nbytes(self) -> int:
        return len(self.values)

    @property
    def shape_text(self) -> str:
        width = WIDTHS.get(self.dtype, 1) * max(self.hidden_size, 1)
        return f"[{len(self.values) // width}, {self.hidden_size}] {self.dtype}"

    def rows(self, first: int, end: int) -> memoryview:
        """Return the bytes of positions [first, end), cut at the prompt's end."""
        size = self.row_bytes
        return memoryview(self.values)[first * size : end * size]

    def cut(self, first: int, end: int) -> "PromptEmbeds":
        if first == 0 and end == self.num_tokens:
            return self
        return PromptEmbeds(self.dtype, self.hidden_size, bytes(self.rows(first, end)))

    def hash_block(self, parent: BlockHash, start: int, token_ids: Sequence[int]) -> BlockHash:
        """Return the hash of a block: dtype, hidden size, number of vectors, vectors, ids after
        them.
        """
        held = min(len(token_ids), self.num_tokens - start)
        digest = blake2b(digest_size=DIGEST_BYTES, person=b"tandem-embeds")
        digest.update(parent)
        digest.update(msgspec.msgpack.encode((self.dtype, self.hidden_size, held)))
        digest.update(self.rows(start, start + held))
        digest.update(id_bytes(token_ids[held:]))
        return BlockHash(digest.digest())

    def verify_shape(self, param: str, hidden_size: int) -> None:
        """Raise InvalidParameter for ``param`` unless these are vectors of ``hidden_size``
        values.
        """
        if self.dtype not in WIDTHS:
            raise InvalidParameter(param, self.dtype, f"a tensor of {', '.join(WIDTHS)}")
        if self.hidden_size != hidden_size:
            allowed = f"vectors of {hidden_size} values each, this model's hidden size"
            raise InvalidParameter(param, self.shape_text, allowed)
        if not self.values or len(self.values) % self.row_bytes:
            raise InvalidParameter(param, self.shape_text, "one whole vector or more")

    def verify_values(self, param: str) -> None:
        """Raise InvalidParameter for ``param`` if a value is too large or not finite.

        Other threads can run between slices.
        """
        mantissa, width = _MANTISSA_BITS[self.dtype], WIDTHS[self.dtype]
        bias = (1 << (_EXPONENT_BITS[self.dtype] - 1)) - 1
        exponents = ((1 << _EXPONENT_BITS[self.dtype]) - 1) << mantissa
        least = (bias + MAX_MAGNITUDE.bit_length() - 1) << mantissa
        top = 1 << (8 * width - 1)
        # A value whose exponent is too large carries into the sign's bit, which was masked out.
        mask, carry, signs = (_repeated(each, width) for each in (exponents, top - least, top))
        values = memoryview(self.values)
        for start in range(0, len(values), _SLICE):
            lanes = int.from_bytes(values[start : start + _SLICE], "little")
            if ((lanes & mask) + carry) & signs & ~(-1 << 8 * min(_SLICE, len(values) - start)):
                allowed = f"finite values of a magnitude under {MAX_MAGNITUDE}"
                raise InvalidParameter(param, self.shape_text, allowed)


@cache
def _repeated(lane: int, width: int) -> int:
    """Return an integer with ``lane`` in every value of a slice. Cached: three per dtype."""
    return int.from_bytes(lane.to_bytes(width, "little") * (_SLICE // width), "little")
