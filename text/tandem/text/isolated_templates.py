"""Rendering of clients' chat templates, each in a separate process that can be killed.

A sandbox does not limit memory or time. Each process has a memory limit, no environment, and a
deadline. The next process is started in advance.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tandem.protocol.errors import InvalidParameter
from tandem.text.chat_template import ChatOptions

SECONDS = 5.0
"""Time limit of a job."""
MEMORY_BYTES = 512 << 20
MAX_SOURCE_CHARS = 256_000
MAX_CHARS = 4_000_000
_CHAR_BYTES = 12
"""Maximum bytes of one character in JSON."""
_BYTES_BESIDE = 65_536
"""Maximum bytes of an answer besides its text, or of an error."""
_READ_BYTES = 1 << 16


class IsolatedTemplates:
    """Renderer for any thread."""

    def __init__(
        self,
        *,
        seconds: float = SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        max_chars: int = MAX_CHARS,
    ) -> None:
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._ready: subprocess.Popen[bytes] | None = None
        self._closed = False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        named_tokens: Mapping[str, str],
    ) -> str:
        """Return the prompt. Raises InvalidParameter, also if the template exceeds a limit."""
        source = options.chat_template or ""
        if len(source) > MAX_SOURCE_CHARS:
            raise InvalidParameter(
                "chat_template", source, f"a template of at most {MAX_SOURCE_CHARS} characters"
            )
        job = {
            "messages": messages,
            "options": asdict(options),
            "named_tokens": dict(named_tokens),
            "memory_bytes": self._memory_bytes,
            "max_chars": self._max_chars,
        }
        answer = self._answer(json.dumps(job).encode(), source)
        if "text" not in answer:
            shown = source if answer["param"] == "chat_template" else messages
            raise InvalidParameter(answer["param"], shown, answer["allowed"])
        text: str = answer["text"]
        return text

    def close(self) -> None:
        with self._lock:
            self._closed = True
            waiting, self._ready = self._ready, None
        if waiting is not None:
            _end(waiting)

    def _answer(self, job: bytes, source: str) -> dict[str, Any]:
        process = self._take()
        deadline = time.monotonic() + self._seconds
        try:
            data = _exchanged(process, job, deadline, _CHAR_BYTES * self._max_chars + _BYTES_BESIDE)
            if data is None:
                allowed = f"a template that renders at most {self._max_chars} characters"
                raise InvalidParameter("chat_template", source, allowed)
            process.wait(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            allowed = f"a template that renders within {self._seconds:g} s"
            raise InvalidParameter("chat_template", source, allowed) from error
        finally:
            _end(process)
            self._prepare()
        if process.returncode != 0:
            allowed = f"a template that renders within {self._memory_bytes >> 20} MiB of memory"
            raise InvalidParameter("chat_template", source, allowed)
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _take(self) -> subprocess.Popen[bytes]:
        with self._lock:
            process, self._ready = self._ready, None
        return _start() if process is None else process

    def _prepare(self) -> None:
        with self._lock:
            if self._ready is None and not self._closed:
                self._ready = _start()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-m", "tandem.text.template_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
    )


def _exchanged(
    process: subprocess.Popen[bytes], job: bytes, deadline: float, most: int
) -> bytes | None:
    """Return the whole output of a process for ``job``; None if it exceeds ``most`` bytes. Raises
    TimeoutError after the deadline."""
    assert process.stdin is not None
    assert process.stdout is not None
    rest, received = memoryview(job), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(received) <= most:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in selector.select(left):
                if key.fileobj is process.stdin:
                    try:
                        # A pipe with room takes this much at once, so the write never blocks.
                        rest = rest[os.write(key.fd, rest[: select.PIPE_BUF]) :]
                    except BrokenPipeError:
                        rest = rest[:0]
                    if not rest:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                part = os.read(key.fd, _READ_BYTES)
                if not part:
                    return bytes(received)
                received += part
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
