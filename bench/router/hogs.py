"""Clients that take as much of a router and its workers as they are given, each by another way.

Run by ``fairness.py`` in a process of its own, until it is ended.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx

MIB = 1 << 20
COMPLETIONS = "/v1/completions"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_LIST_SERVICES = b"\x3a\x01*"
"""A ServerReflectionRequest that asks for the list of services."""
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_ACK, _END_HEADERS = 1, 4
_FRAME_BYTES = 16_384


class Hog:
    """One client with a key of its own; ``run`` goes on without end."""

    def __init__(self, url: str, rpc_port: int, key: str) -> None:
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port
        self.rpc_port = rpc_port
        self.key = key
        self.statuses: dict[str, int] = {}
        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits)
        self._numbers = itertools.count()

    async def run(self, name: str) -> None:
        """Be the hog of this name."""
        await _HOGS[name](self)

    async def each(self, at_once: int, path: str, make: Callable[[int], dict[str, Any]]) -> None:
        """Keep so many requests under way."""

        async def one() -> None:
            while True:
                content = json.dumps(make(next(self._numbers)))
                try:
                    answer = await self.http.post(path, content=content)
                    status = str(answer.status_code)
                except httpx.HTTPError as error:
                    status = type(error).__name__
                self.statuses[status] = self.statuses.get(status, 0) + 1
                if not status.startswith("2"):
                    await asyncio.sleep(0.2)

        await asyncio.gather(*(one() for _ in range(at_once)))

    async def tokenize(self) -> None:
        """60 texts of 3.9 million characters at once."""
        await self.each(60, "/tokenize", lambda _: {"prompt": "word " * 780_000})

    async def chats(self) -> None:
        """60 chats of 4,096 messages at once."""
        said = [
            {"role": ("user", "assistant")[at % 2], "content": "word " * 30} for at in range(4096)
        ]
        await self.each(60, "/tokenize", lambda _: {"messages": said})

    async def prompts(self) -> None:
        """16 calls of 256 prompts."""
        await self.each(
            16,
            COMPLETIONS,
            lambda at: {"prompt": [f"{at} {n}" for n in range(256)], "max_tokens": 16},
        )

    async def long_prompts(self) -> None:
        """16 prompts of some 2,000 tokens, none of which is cached."""
        await self.each(
            16,
            COMPLETIONS,
            lambda at: {"prompt": f"{at} " + "word " * 1_900, "max_tokens": 1},
        )

    async def prompt_logprobs(self) -> None:
        """16 prompts of 1,500 tokens with the log-probabilities of all of them."""
        body = {"max_tokens": 1, "prompt_logprobs": 20}
        await self.each(16, COMPLETIONS, lambda at: {"prompt": f"{at} " + "a " * 750, **body})

    async def choices(self) -> None:
        """16 calls with 128 choices each."""
        await self.each(
            16, COMPLETIONS, lambda at: {"prompt": f"Story {at}", "n": 128, "max_tokens": 64}
        )

    async def responses(self) -> None:
        """Stored responses of one token, one after the other."""
        await self.each(8, "/v1/responses", lambda _: {"input": "Hi", "max_output_tokens": 1})

    async def uploads(self) -> None:
        """24 uploads of 31 MiB that stand still before their last byte."""
        await asyncio.gather(*(self._upload() for _ in range(24)))

    async def unread(self) -> None:
        """64 streams that are not read."""
        body = {"prompt": "Story:", "max_tokens": 1_500, "stream": True, "ignore_eos": True}
        await asyncio.gather(*(self._unread(json.dumps(body).encode()) for _ in range(64)))

    async def reflection(self) -> None:
        """Four streams of gRPC reflection that ask without end."""
        await asyncio.gather(*(self._flood() for _ in range(4)))

    async def held(self) -> None:
        """24 messages of gRPC of 31 MiB that stand still before their last byte."""
        await asyncio.gather(*(self._hold() for _ in range(24)))

    def _head(self, path: str, length: int) -> bytes:
        lines = (
            f"POST {path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            f"Authorization: Bearer {self.key}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        )
        return "\r\n".join((*lines, "", "")).encode()

    async def _upload(self) -> None:
        size = 31 * MIB
        while True:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            writer.write(self._head(COMPLETIONS, size))
            try:
                for _ in range(31):
                    writer.write(b" " * MIB)
                    await writer.drain()
                await reader.read()  # until the server has had enough
            except OSError:
                pass
            writer.close()
            await asyncio.sleep(0.2)

    async def _unread(self, body: bytes) -> None:
        while True:
            raw = socket.create_connection((self.host, self.port))
            raw.sendall(self._head(COMPLETIONS, len(body)) + body)
            await asyncio.sleep(60)
            raw.close()

    async def _flood(self) -> None:
        key = (("authorization", f"Bearer {self.key}"),)
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(f"{self.host}:{self.rpc_port}", options) as channel:
            reflect: Any = channel.stream_stream(_REFLECTION)
            while True:
                with suppress(grpc.RpcError):
                    async for _ in reflect(_without_end(), metadata=key):
                        pass
                await asyncio.sleep(0.05 + random.random() / 10)

    async def _hold(self) -> None:
        while True:
            reader, writer = await asyncio.open_connection(self.host, self.rpc_port)
            with suppress(OSError, EOFError):
                await self._hold_on(reader, writer)
            writer.close()
            await asyncio.sleep(0.05 + random.random() / 10)

    async def _hold_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send a message but for its last byte, as fast as the windows of HTTP/2 allow."""
        head = {":method": "POST", ":scheme": "http", ":authority": "x"}
        head |= {":path": "/tandem.v1.Inference/Generate", "content-type": "application/grpc"}
        head |= {"te": "trailers", "authorization": f"Bearer {self.key}"}
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS))
        writer.write(_frame(_HEADERS, _literals(head), flags=_END_HEADERS, stream=1))
        size = 31 * MIB
        left = memoryview(bytes(1) + size.to_bytes(4, "big") + bytes(size - 1))
        room = {0: 65_535, 1: 65_535}
        while True:
            while left and (most := min(*room.values(), _FRAME_BYTES)) > 0:
                part, left = left[:most], left[most:]
                room = {stream: each - len(part) for stream, each in room.items()}
                writer.write(_frame(_DATA, bytes(part), stream=1))
                await writer.drain()
            start = await reader.readexactly(9)
            body = await reader.readexactly(int.from_bytes(start[:3], "big"))
            kind, flags, stream = start[3], start[4], int.from_bytes(start[5:], "big")
            if kind == _WINDOW_UPDATE:
                room[stream] += int.from_bytes(body, "big")
            elif kind in (_SETTINGS, _PING) and not flags:
                writer.write(_frame(kind, body if kind == _PING else b"", flags=_ACK))
            elif kind not in (_SETTINGS, _PING):
                return  # the server ends the call


async def _without_end() -> AsyncIterator[bytes]:
    while True:
        yield _LIST_SERVICES


def _frame(kind: int, body: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _literals(head: dict[str, str]) -> bytes:
    """Headers as literals of HPACK, neither indexed nor compressed."""
    texts = (text.encode() for pair in head.items() for text in pair)
    sized = [bytes((len(text),)) + text for text in texts]
    return b"".join(
        bytes(1) + name + value for name, value in zip(sized[::2], sized[1::2], strict=True)
    )


_HOGS: dict[str, Callable[[Hog], Awaitable[None]]] = {
    "tokenize": Hog.tokenize,
    "chats": Hog.chats,
    "prompts": Hog.prompts,
    "long_prompts": Hog.long_prompts,
    "prompt_logprobs": Hog.prompt_logprobs,
    "choices": Hog.choices,
    "responses": Hog.responses,
    "uploads": Hog.uploads,
    "unread": Hog.unread,
    "reflection": Hog.reflection,
    "held": Hog.held,
}
NAMES = tuple(_HOGS)


def be(name: str, url: str, rpc_port: int, key: str) -> None:
    """Be a hog until the process is ended."""
    asyncio.run(Hog(url, rpc_port, key).run(name))
