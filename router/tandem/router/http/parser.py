"""Parser of HTTP/1.1 requests that ignores upgrades (RFC 9110, section 7.8).

httptools ends a message at the head of an upgrade. So a new parser gets that head without it.
Clients with h2c rely on this.
"""

from __future__ import annotations

from typing import Protocol

import httptools

_DROPPED = frozenset({b"upgrade", b"http2-settings"})


class Receiver(Protocol):
    """Connection of a parser."""

    url: bytes
    headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...
    def on_head_again(self) -> None:
        """Note that the parts of this head come again."""


class RequestParser:
    """httptools' parser with the methods that uvicorn calls."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.on_message_begin = receiver.on_message_begin
        self.on_url = receiver.on_url
        self.on_header = receiver.on_header
        self.on_body = receiver.on_body
        self._begin()

    def _begin(self) -> None:
        self._upgrades = False
        self._parser = httptools.HttpRequestParser(self)
        # As uvicorn: bytes after the last request of a connection are no error.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def close(self) -> None:
        del self._parser

    def feed_data(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                head = self._plain_head()
                self._receiver.on_head_again()
                self._begin()
                data = head + data[upgrade.args[0] :]
            else:
                return

    def on_headers_complete(self) -> None:
        """Pass a head on, unless it comes again without its upgrade."""
        self._upgrades = self._parser.should_upgrade()
        if not self._upgrades:
            self._receiver.on_headers_complete()
        elif self._parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError("CONNECT is not supported")

    def on_message_complete(self) -> None:
        if not self._upgrades:
            self._receiver.on_message_complete()

    def get_http_version(self) -> str:
        version: str = self._parser.get_http_version()
        return version

    def get_method(self) -> bytes:
        method: bytes = self._parser.get_method()
        return method

    def should_keep_alive(self) -> bool:
        keeps: bool = self._parser.should_keep_alive()
        return keeps

    def should_upgrade(self) -> bool:
        return False

    def _plain_head(self) -> bytes:
        receiver, version = self._receiver, self.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.get_method(), receiver.url, version)]
        for name, value in receiver.headers:
            if name == b"connection":
                options = [each.strip() for each in value.split(b",")]
                value = b", ".join(each for each in options if each.lower() not in _DROPPED)
            if name not in _DROPPED and (value or name != b"connection"):
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])


def framing_problem(version: str, headers: list[tuple[bytes, bytes]]) -> str | None:
    """Return why the end of a request is ambiguous, or None (RFC 9112, section 6)."""
    if version not in ("1.0", "1.1"):
        return f"HTTP/{version} is not served here; HTTP/1.1 is"
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and version == "1.0":
        return "Transfer-Encoding: not allowed in HTTP/1.0; Content-Length is"
    if codings and [value.strip().lower() for value in codings] != [b"chunked"]:
        text = b", ".join(codings)[:64].decode("latin-1")
        return f"Transfer-Encoding: {text!r} is not allowed; only chunked is"
    if sum(name == b"host" for name, _ in headers) > 1:
        return "Host: given more than once"
    return None


def host_of(url: bytes) -> bytes | None:
    """Return the host of an absolute URL, which overrides the header's; None for a path.

    RFC 9112, section 3.2.2.
    """
    if url.startswith(b"/"):
        return None
    _, found, rest = url.partition(b"://")
    return rest.partition(b"/")[0].partition(b"?")[0].rpartition(b"@")[2] if found else None
