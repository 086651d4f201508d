"""The zip that ``torch.save`` writes: entries that are stored as they are, found by its directory.

Nothing is decompressed, so that nothing grows: an entry that is compressed is refused. Entries lie
within the file and do not overlap, there are few of them, and their checksums are right.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import NamedTuple

from tandem.text.embeds.pickled import PickledTensor, read_pickle
from tandem.text.embeds.problem import NotATensor, SavedTensor, num_values

_MAGIC = b"PK\x03\x04"
_END = struct.Struct("<4s4H2IH")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_MOST_ENTRIES = 32
_MOST_NAME = 256
_MOST_EXTRA = 1 << 12
_MOST_PICKLE = 1 << 12
_WIDE = 0xFFFFFFFF
"""What a field says that stands in the directory of a file over 4 GiB instead."""
_LEGACY = re.compile(rb"\x80[\x02-\x05]")


class _Entry(NamedTuple):
    start: int
    """Of its local header."""
    size: int
    checksum: int


def is_archive(data: bytes) -> bool:
    """Whether the bytes begin as such a file, or as an older one, which is refused by name."""
    return data.startswith(_MAGIC) or _LEGACY.match(data) is not None


def read_archive(data: bytes) -> SavedTensor:
    """The tensor that was saved. Raises NotATensor."""
    if not data.startswith(_MAGIC):
        raise NotATensor("it is of the form before torch 1.6, or a bare pickle")
    entries, ends = _directory(data)
    root = next((name[:-9] for name in entries if name.endswith("/data.pkl")), None)
    if root is None or any(not name.startswith(root + "/") for name in entries):
        raise NotATensor("it is a zip of something else")
    pickle = _content(data, entries, f"{root}/data.pkl", ends)
    if len(pickle) > _MOST_PICKLE:
        raise NotATensor("its pickle is longer than that of a tensor")
    order = f"{root}/byteorder"
    if order in entries and bytes(_content(data, entries, order, ends)) != b"little":
        raise NotATensor("its values are not little-endian")
    tensor = read_pickle(bytes(pickle))
    return _tensor_of(tensor, _content(data, entries, f"{root}/data/{tensor.key}", ends))


def _tensor_of(tensor: PickledTensor, storage: memoryview) -> SavedTensor:
    count, width = num_values(tensor.shape), tensor.width
    if len(storage) != tensor.storage_values * width:
        raise NotATensor("its storage is not as long as its pickle says")
    if not 0 <= tensor.offset <= tensor.storage_values - count:
        raise NotATensor("its values lie beyond its storage")
    if not _is_contiguous(tensor.shape, tensor.stride):
        raise NotATensor("it is not contiguous: save tensor.contiguous()")
    begin = tensor.offset * width
    return SavedTensor(tensor.dtype, tensor.shape, storage[begin : begin + count * width])


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Row-major without gaps; the stride of one row alone says nothing."""
    if len(shape) != len(stride):
        return False
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _directory(data: bytes) -> tuple[dict[str, _Entry], list[int]]:
    """Entries by name; where each local header begins, and the directory, in order."""
    at = len(data) - _END.size
    if at < 0:
        raise NotATensor("the zip ends early")
    magic, disk, disk_too, here, count, size, start, comment = _END.unpack_from(data, at)
    if magic != b"PK\x05\x06" or disk or disk_too or here != count or comment:
        raise NotATensor("the zip ends early")
    if count > _MOST_ENTRIES or _WIDE in (size, start) or start + size > at:
        raise NotATensor("the zip's directory is not that of one tensor")
    entries: dict[str, _Entry] = {}
    place = start
    for _ in range(count):
        place, name, entry = _entry(data, place, start + size)
        if name in entries:
            raise NotATensor("the zip has two entries of one name")
        if entry.start >= start:
            raise NotATensor("an entry of the zip lies beyond its end")
        entries[name] = entry
    if place != start + size:
        raise NotATensor("the zip's directory is not that of one tensor")
    return entries, sorted([*(each.start for each in entries.values()), start])


def _entry(data: bytes, place: int, end: int) -> tuple[int, str, _Entry]:
    if place + _ENTRY.size > end:
        raise NotATensor("the zip's directory ends early")
    fields = _ENTRY.unpack_from(data, place)
    magic, _, _, flags, method, _, _, checksum, packed, size, name, extra, comment, *rest = fields
    start = rest[-1]
    if magic != b"PK\x01\x02" or flags & 1 or extra > _MOST_EXTRA or comment > _MOST_EXTRA:
        raise NotATensor("the zip's directory is not that of one tensor")
    if method or packed != size:
        raise NotATensor("an entry of the zip is compressed, which torch.save never does")
    if _WIDE in (size, start) or not 0 < name <= _MOST_NAME:
        raise NotATensor("the zip's directory is not that of one tensor")
    after = place + _ENTRY.size
    if after + name + extra + comment > end:
        raise NotATensor("the zip's directory ends early")
    try:
        text = data[after : after + name].decode("ascii")
    except UnicodeDecodeError as error:
        raise NotATensor("a name in the zip is not of torch's") from error
    return after + name + extra + comment, text, _Entry(start, size, checksum)


def _content(data: bytes, entries: dict[str, _Entry], name: str, ends: list[int]) -> memoryview:
    """What an entry holds, whose checksum is right."""
    entry = entries.get(name)
    if entry is None:
        raise NotATensor(f"the zip has no {name.partition('/')[2][:64]}")
    start = entry.start
    limit = next((each for each in ends if each > start), 0)
    if start + _LOCAL.size > limit:
        raise NotATensor("entries of the zip overlap")
    magic, _, _, method, _, _, _, _, _, name_size, extra = _LOCAL.unpack_from(data, start)
    begin = start + _LOCAL.size + name_size + extra
    if magic != _MAGIC or method or begin + entry.size > limit:
        raise NotATensor("entries of the zip overlap")
    content = memoryview(data)[begin : begin + entry.size]
    if zlib.crc32(content) != entry.checksum:
        raise NotATensor("a checksum of the zip is wrong")
    return content
