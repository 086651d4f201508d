"""Process that compiles and follows grammars of libraries without limits.

Started by ``GrammarProcess`` with ``python -m`` and two channels: one thread compiles, one follows
answers. The kernel limits memory and compile time. It ends when a channel closes.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from tandem.engine.executor.channel import Channel, ChannelClosed, inherited
from tandem.engine.structured.backends.base import Library, Matcher
from tandem.engine.structured.backends.format_enforcer import EnforcerBackend
from tandem.engine.structured.backends.guidance import read_tokenizer
from tandem.engine.structured.backends.outlines import OutlinesBackend
from tandem.engine.structured.backends.xgrammar import XGrammarBackend
from tandem.engine.structured.errors import GrammarError
from tandem.engine.structured.messages import DONE, ERROR, UNKNOWN, Compile, Follow, Setup, State

MAX_COMPILED = 32
_CONTROLS = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
SEND_SECONDS = 10.0
BACKENDS: dict[str, Callable[[Sequence[bytes]], Library]] = {
    "outlines": OutlinesBackend,
    "xgrammar": XGrammarBackend,
    "lm-format-enforcer": EnforcerBackend,
}


class Child:
    """State of the process."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._tokens: list[bytes] = []
        self._backends: dict[str, Library] = {}
        self._compiled: dict[bytes, Matcher] = {}
        self._most = 0
        """Addresses that the process may use."""
        self._answers: dict[int, Matcher] = {}

    def compile(self, message: bytes) -> bytes:
        job = msgspec.msgpack.decode(message, type=Compile)
        if job.backend not in self._backends:
            _limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
            self._tokens = self._tokens or tokens_of(
                Path(self._setup.folder), self._setup.vocab_size
            )
            self._backends[job.backend] = BACKENDS[job.backend](self._tokens)
            self._most = _size() + self._setup.memory_bytes
            _limit(resource.RLIMIT_AS, self._most)
        if job.form is None or message in self._compiled:
            return DONE
        if _size() > self._most - self._setup.memory_bytes // 2:
            self._compiled.clear()
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + job.seconds) + 1)
        try:
            self._compiled[message] = self._backends[job.backend].compile(job.form)
        finally:
            _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
        if len(self._compiled) > MAX_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        return DONE

    def follow(self, message: bytes) -> bytes:
        job = msgspec.msgpack.decode(message, type=Follow)
        for each in job.ended:
            self._answers.pop(each, None)
        matcher = self._answers.pop(job.answer, None)
        if matcher is None:
            compiled = self._compiled.get(job.form)
            if compiled is None:
                return UNKNOWN
            matcher = compiled.copy()
        matcher.accept(job.tokens)
        words = bytearray(4 * -(-self._setup.vocab_size // 32))
        matcher.fill(memoryview(words))
        self._answers[job.answer] = matcher
        accepting = matcher.is_accepting
        if not accepting and not any(words):
            raise GrammarError("a format that some text of this vocabulary matches")
        return DONE + msgspec.msgpack.encode(State(bytes(words), accepting))


def tokens_of(folder: Path, vocab_size: int) -> list[bytes]:
    """Return the bytes of each token, none if it is not text. Control characters except line ends
    are left out, as libraries allow them in JSON strings. Raises NoBackend."""
    tokenizer = read_tokenizer(folder, vocab_size)
    ends, tokens = set(tokenizer.eos_tokens), list[bytes]()
    for token in range(vocab_size):
        special = token in ends or tokenizer.is_special_token(token)
        text = b"" if special else tokenizer.decode_bytes([token])
        tokens.append(b"" if _CONTROLS.search(text) else text)
    return tokens


def serve(channel: Channel, answer: Callable[[bytes], bytes]) -> None:
    """Answer messages until the channel closes, then end the process."""
    with suppress(ChannelClosed, TimeoutError):
        while True:
            message = channel.receive(seconds=None)
            try:
                found = answer(message)
            except BaseException as error:  # a library's panic is not an Exception
                found = ERROR + _words(error).encode(errors="replace")
            channel.send(found, seconds=SEND_SECONDS)
    os._exit(0)


def main() -> None:
    """Serve the channels of the command line."""
    compiling, following = (inherited(int(each)) for each in sys.argv[1:3])
    child = Child(msgspec.json.decode(sys.argv[3], type=Setup))
    logging.disable()
    threading.Thread(target=serve, args=(compiling, child.compile), daemon=True).start()
    serve(following, child.follow)


def _limit(what: int, soft: int) -> None:
    with suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(what, (soft, resource.getrlimit(what)[1]))


def _size() -> int:
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()


def _words(error: BaseException) -> str:
    words = " ".join(str(error).split())
    if isinstance(error, GrammarError):
        return words
    if isinstance(error, MemoryError) or "bad_alloc" in words:
        return "a format that compiles in the memory limit"
    return f"a format that the backend compiles: {words[:300] or type(error).__name__}"


if __name__ == "__main__":
    main()
