"""A small OpenAI server that is not Tandem, for the tests of the harness itself.

    python stand_in.py PORT FAULT

Answers by a function of the question, slowly enough that a stream can be left. FAULT is ``none``,
or what one answer in about twenty is: ``wrong`` (another word in it), ``cut`` (its stream ends
early), ``hang`` (never ends), ``busy`` (503 with Retry-After), ``rude`` (503 without).
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

FAULT_EVERY = 20
HEALTHY = 200
"""Requests that are answered well first: those by which the answers are learned."""
_numbers = count(1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fault = "none"

    def do_POST(self) -> None:
        """Answer, or do what the fault is."""
        number = next(_numbers)
        hurt = number > HEALTHY and number % FAULT_EVERY == 0
        fault = self.fault if hurt else "none"
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if fault == "hang":
            time.sleep(3600)
        if fault in ("busy", "rude"):
            self._whole(503, {"error": {"message": "too many"}}, wait=fault == "busy")
            return
        choices = [_words(body, index) for index in range(body["n"])]
        if fault == "wrong":
            choices[0][-1] += "x"
        if body["stream"]:
            self._stream(choices, cut=fault == "cut")
        else:
            whole = [_choice(i, "".join(words), "length") for i, words in enumerate(choices)]
            self._whole(200, {"choices": whole})

    def _whole(self, status: int, content: dict[str, Any], *, wait: bool = False) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        if wait:
            self.send_header("retry-after", "1")
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, choices: list[list[str]], *, cut: bool) -> None:
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        for index, words in enumerate(choices):
            for place, word in enumerate(words):
                last = place == len(words) - 1
                if last and cut:
                    return
                self._event({"choices": [_choice(index, word, "length" if last else None)]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _words(body: dict[str, Any], index: int) -> list[str]:
    seed = f"{body['prompt']} {body['seed']} {index}".encode()
    return [
        f" {hashlib.sha256(seed + str(place).encode()).hexdigest()[:6]}"
        for place in range(body["max_tokens"])
    ]


def _choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": finish}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client left."""


if __name__ == "__main__":
    Handler.fault = sys.argv[2]
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
