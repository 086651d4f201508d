"""The pickle within a saved tensor, read as a list of opcodes; nothing that it names is called.

A machine of the few opcodes that ``torch.save`` writes for one tensor (pickle protocols 2 to 5): it
pushes numbers, texts and tuples, and knows names as marks alone. What such a pickle calls is known:
an empty OrderedDict, and the tensor's making, of which the arguments are kept. Any other opcode,
name or call is refused where it stands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tandem.text.embeds.problem import NotATensor

_STORAGES = {
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "DoubleStorage": ("float64", 8),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
}
"""Classes of torch that stand for a dtype, and bytes of its values. Those that no prompt has are
here to be refused by their own name."""
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?|mps(:[0-9]{1,3})?")
_KEY = re.compile(r"[0-9]{1,9}")
_MOST_STEPS = 256
_MOST_MEMO = 64


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """What the pickle says of the tensor."""

    dtype: str
    width: int
    """Bytes of a value."""
    key: str
    """Of the entry with its values."""
    storage_values: int
    """Values in that entry."""
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    """A name of a module's; never looked up."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    width: int
    key: str
    count: int


class _Mark:
    """Where a tuple begins."""


_MARK = _Mark()
_REBUILD = _Name("torch._utils", "_rebuild_tensor_v2")
_HOOKS = _Name("collections", "OrderedDict")
_NO_HOOKS = object()
"""An empty OrderedDict."""


def read_pickle(data: bytes) -> PickledTensor:
    """The tensor that ``data`` makes. Raises NotATensor."""
    machine = _Machine(data)
    for _ in range(_MOST_STEPS):
        if machine.step():
            return machine.result()
    raise NotATensor("its pickle has more opcodes than that of a tensor")


class _Machine:
    """A stack, a memo, and where the next opcode is."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def result(self) -> PickledTensor:
        """What is left at the end."""
        if self._at != len(self._data) or len(self._stack) != 1:
            raise NotATensor("its pickle does not end with a tensor")
        (tensor,) = self._stack
        if not isinstance(tensor, PickledTensor):
            raise NotATensor("its pickle is not one of a tensor alone")
        return tensor

    def step(self) -> bool:
        """Do the next opcode; whether it was the last."""
        code = self._take(1)
        match code:
            case b".":
                return True
            case b"\x80":
                if self._at != 1 or not 2 <= self._take(1)[0] <= 5:
                    raise NotATensor("its pickle is of another protocol")
            case b"\x95":
                self._take(8)
            case b"(":
                self._stack.append(_MARK)
            case b"c":
                self._push(_Name(self._line(), self._line()))
            case b"\x93":
                name, module = self._pop(), self._pop()
                if not (isinstance(name, str) and isinstance(module, str)):
                    raise NotATensor("its pickle names something by no text")
                self._push(_Name(module, name))
            case b"q":
                self._remember(self._take(1)[0])
            case b"\x94":
                self._remember(len(self._memo))
            case b"h":
                self._push(self._recall(self._take(1)[0]))
            case b"X":
                self._push(self._text(int.from_bytes(self._take(4), "little")))
            case b"\x8c":
                self._push(self._text(self._take(1)[0]))
            case b"K":
                self._push(self._take(1)[0])
            case b"M":
                self._push(int.from_bytes(self._take(2), "little"))
            case b"J":
                self._push(int.from_bytes(self._take(4), "little", signed=True))
            case b"\x8a":
                size = self._take(1)[0]
                if size > 8:
                    raise NotATensor("its pickle has a number that no tensor has")
                self._push(int.from_bytes(self._take(size), "little", signed=True))
            case b"\x88" | b"\x89":
                self._push(code == b"\x88")
            case b")":
                self._push(())
            case b"\x85" | b"\x86" | b"\x87":
                count = code[0] - 0x84
                self._push(tuple(reversed([self._pop() for _ in range(count)])))
            case b"t":
                self._push(self._since_mark())
            case b"Q":
                self._push(_storage_of(self._pop()))
            case b"R":
                arguments = self._pop()
                self._push(_called(self._pop(), arguments))
            case _:
                raise NotATensor(f"its pickle has the opcode 0x{code.hex()}, which no tensor needs")
        return False

    def _take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise NotATensor("its pickle ends early")
        self._at += count
        return part

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + 128)
        if end < 0:
            raise NotATensor("its pickle has a name without an end")
        line = self._take(end - self._at).decode("ascii", "replace")
        self._at += 1
        return line

    def _text(self, size: int) -> str:
        if size > 128:
            raise NotATensor("its pickle has a text that no tensor has")
        return self._take(size).decode("ascii", "replace")

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _pop(self) -> object:
        if not self._stack or self._stack[-1] is _MARK:
            raise NotATensor("its pickle takes what it never had")
        return self._stack.pop()

    def _since_mark(self) -> tuple[object, ...]:
        values: list[object] = []
        while self._stack and self._stack[-1] is not _MARK:
            values.append(self._stack.pop())
        if not self._stack:
            raise NotATensor("its pickle takes what it never had")
        self._stack.pop()
        return tuple(reversed(values))

    def _remember(self, place: int) -> None:
        if not self._stack or len(self._memo) >= _MOST_MEMO:
            raise NotATensor("its pickle remembers more than a tensor's")
        self._memo[place] = self._stack[-1]

    def _recall(self, place: int) -> object:
        if place not in self._memo:
            raise NotATensor("its pickle takes what it never had")
        return self._memo[place]


def _storage_of(value: object) -> _Storage:
    """Of a persistent id: ("storage", its class, key, device, values)."""
    match value:
        case ("storage", _Name("torch", kind), str(key), str(device), int(count)) if (
            kind in _STORAGES and _KEY.fullmatch(key) and _DEVICE.fullmatch(device) and count >= 0
        ):
            dtype, width = _STORAGES[kind]
            return _Storage(dtype, width, key, count)
    raise NotATensor("its storage is none that is known")


def _called(function: object, arguments: object) -> object:
    """What the two calls of a tensor's pickle make."""
    if function == _HOOKS and arguments == ():
        return _NO_HOOKS
    if function != _REBUILD:
        raise NotATensor("its pickle calls what no plain tensor needs: save tensor.detach()")
    match arguments:
        case (_Storage() as storage, int(offset), tuple(shape), tuple(stride), bool(), hooks) if (
            hooks is _NO_HOOKS
        ):
            return PickledTensor(
                storage.dtype,
                storage.width,
                storage.key,
                storage.count,
                offset,
                _sizes(shape),
                _sizes(stride),
            )
    raise NotATensor("its pickle makes a tensor of what is none")


def _sizes(values: tuple[object, ...]) -> tuple[int, ...]:
    sizes = tuple(each for each in values if isinstance(each, int) and not isinstance(each, bool))
    if len(sizes) != len(values) or any(each < 0 for each in sizes) or len(sizes) > 3:
        raise NotATensor("its shape is none of two dimensions")
    return sizes
