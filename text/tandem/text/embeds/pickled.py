"""The pickle within a saved tensor, read as a list of opcodes; nothing that it names is called.

A machine of the few opcodes that ``torch.save`` writes for one tensor (pickle protocols 2 to 5): it
pushes numbers, texts and tuples, and knows names as marks alone. What such a pickle calls is known:
an empty OrderedDict, and the tensor's making, of which the arguments are kept. Any other opcode,
name or call is refused where it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
_MOST_TEXT = 128
_MOST_LONG = 8


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
        if code == b".":
            return True
        done = _OPCODES.get(code)
        if done is None:
            raise NotATensor(f"its pickle has the opcode 0x{code.hex()}, which no tensor needs")
        done(self)
        return False

    def protocol(self) -> None:
        """Its number, which stands first."""
        if self._at != 1 or not 2 <= self._take(1)[0] <= 5:
            raise NotATensor("its pickle is of another protocol")

    def skip(self, count: int) -> None:
        """Pass over an argument that says nothing here."""
        self._take(count)

    def push(self, value: object) -> None:
        """A constant, or what was made."""
        self._stack.append(value)

    def number(self, size: int, *, signed: bool = False) -> None:
        """An integer of so many bytes."""
        self.push(int.from_bytes(self._take(size), "little", signed=signed))

    def long_number(self) -> None:
        """An integer that says its own bytes."""
        size = self._take(1)[0]
        if size > _MOST_LONG:
            raise NotATensor("its pickle has a number that no tensor has")
        self.number(size, signed=True)

    def text(self, size: int) -> None:
        """A text behind its length of ``size`` bytes."""
        length = int.from_bytes(self._take(size), "little")
        if length > _MOST_TEXT:
            raise NotATensor("its pickle has a text that no tensor has")
        self.push(self._take(length).decode("ascii", "replace"))

    def name(self) -> None:
        """Module and name, a line each."""
        module = self._line()
        self.push(_Name(module, self._line()))

    def stacked_name(self) -> None:
        """Module and name from the stack."""
        name, module = self._pop(), self._pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise NotATensor("its pickle names something by no text")
        self.push(_Name(module, name))

    def remember(self, place: int | None = None) -> None:
        """The top of the stack, under the next number or one that follows."""
        if not self._stack or len(self._memo) >= _MOST_MEMO:
            raise NotATensor("its pickle remembers more than a tensor's")
        self._memo[len(self._memo) if place is None else place] = self._stack[-1]

    def remember_there(self) -> None:
        """Under a number that follows."""
        self.remember(self._take(1)[0])

    def recall(self) -> None:
        """What was remembered."""
        place = self._take(1)[0]
        if place not in self._memo:
            raise NotATensor("its pickle takes what it never had")
        self.push(self._memo[place])

    def tuple_of(self, count: int) -> None:
        """Of the last so many."""
        self.push(tuple(reversed([self._pop() for _ in range(count)])))

    def tuple_since_mark(self) -> None:
        """Of all behind the last mark."""
        values: list[object] = []
        while self._stack and self._stack[-1] is not _MARK:
            values.append(self._stack.pop())
        if not self._stack:
            raise NotATensor("its pickle takes what it never had")
        self._stack.pop()
        self.push(tuple(reversed(values)))

    def persistent(self) -> None:
        """A storage by its id."""
        self.push(_storage_of(self._pop()))

    def call(self) -> None:
        """What a call makes that is known; nothing is called."""
        arguments = self._pop()
        self.push(_called(self._pop(), arguments))

    def _take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise NotATensor("its pickle ends early")
        self._at += count
        return part

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + _MOST_TEXT)
        if end < 0:
            raise NotATensor("its pickle has a name without an end")
        line = self._take(end - self._at).decode("ascii", "replace")
        self._at += 1
        return line

    def _pop(self) -> object:
        if not self._stack or self._stack[-1] is _MARK:
            raise NotATensor("its pickle takes what it never had")
        return self._stack.pop()


_OPCODES: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _Machine.protocol,
    b"\x95": lambda machine: machine.skip(8),  # length of a frame
    b"(": lambda machine: machine.push(_MARK),
    b")": lambda machine: machine.push(()),
    b"\x88": lambda machine: machine.push(True),
    b"\x89": lambda machine: machine.push(False),
    b"K": lambda machine: machine.number(1),
    b"M": lambda machine: machine.number(2),
    b"J": lambda machine: machine.number(4, signed=True),
    b"\x8a": _Machine.long_number,
    b"X": lambda machine: machine.text(4),
    b"\x8c": lambda machine: machine.text(1),
    b"c": _Machine.name,
    b"\x93": _Machine.stacked_name,
    b"q": _Machine.remember_there,
    b"\x94": _Machine.remember,
    b"h": _Machine.recall,
    b"\x85": lambda machine: machine.tuple_of(1),
    b"\x86": lambda machine: machine.tuple_of(2),
    b"\x87": lambda machine: machine.tuple_of(3),
    b"t": _Machine.tuple_since_mark,
    b"Q": _Machine.persistent,
    b"R": _Machine.call,
}
"""All that is understood."""


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
