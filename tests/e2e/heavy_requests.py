"""Requests that are expensive to parse: named ones, and random ones of any size."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
Heavy = tuple[str, str, bytes]
"""Name, path, body."""
MB = 1 << 20


def _json(name: str, path: str, **body: Any) -> Heavy:
    return name, path, json.dumps(body).encode()


def named() -> Iterator[Heavy]:
    one: dict[str, Any] = {"prompt": "Hi", "max_tokens": 1}
    user = {"role": "user", "content": "Hi"}
    yield _json("20,000 prompts", COMPLETIONS, prompt=["a"] * 20_000, max_tokens=1)
    yield _json("256 prompts", COMPLETIONS, prompt=["a b"] * 256, max_tokens=1)
    yield _json("256 prompts of 200 words", COMPLETIONS, prompt=["word " * 200] * 256, max_tokens=1)
    yield _json("n=128", COMPLETIONS, prompt="Hi", n=128, max_tokens=16)
    yield _json("n=128, logprobs", COMPLETIONS, prompt="Hi", n=128, max_tokens=16, logprobs=20)
    yield _json(
        "prompt_logprobs", COMPLETIONS, prompt="a " * 1_500, prompt_logprobs=20, max_tokens=1
    )
    yield _json(
        "echo, logprobs", COMPLETIONS, prompt="a " * 1_500, echo=True, logprobs=20, max_tokens=1
    )
    yield _json("100,000 bad words", COMPLETIONS, bad_words=["a b"] * 100_000, **one)
    yield _json("1,000 bad words", COMPLETIONS, bad_words=[f"bad {n}" for n in range(1_000)], **one)
    yield _json("100,000 stops", COMPLETIONS, stop=["x"] * 100_000, **one)
    yield _json("a stop of 30 MB", COMPLETIONS, stop="x" * 30 * MB, **one)
    yield _json("biases", COMPLETIONS, logit_bias={str(n): 1 for n in range(49_000)}, **one)
    yield _json("allowed ids", COMPLETIONS, allowed_token_ids=list(range(49_000)), **one)
    yield _json("1M wrong ids", COMPLETIONS, allowed_token_ids=["x"] * 999_000, **one)
    yield _json("990,000 ids", COMPLETIONS, prompt=[1] * 990_000, max_tokens=1)
    yield _json("a text of 31 MB", COMPLETIONS, prompt="x" * 31 * MB, max_tokens=1)
    yield _json("a text of 3.9 MB", COMPLETIONS, prompt="word " * 780_000, max_tokens=1)
    yield _json("4,096 messages", CHATS, messages=[user] * 4_096, max_tokens=1)
    yield _json("100,000 messages", CHATS, messages=[user] * 100_000, max_tokens=1)
    long = {"role": "user", "content": "word " * 700_000}
    yield _json("a message of 3.5 MB", CHATS, messages=[long], max_tokens=1)
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}] * 40_000}
    yield _json("40,000 parts", CHATS, messages=[parts], max_tokens=1)
    yield _json(
        "names for a template",
        CHATS,
        messages=[user],
        max_tokens=1,
        chat_template_kwargs={f"x{n}": n for n in range(50_000)},
    )
    yield _json("a template", CHATS, messages=[user], chat_template="{{ 'a' * 500000000 }}")
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    yield _json("a template of loops", CHATS, messages=[user], chat_template=loops)
    yield _json("tokenize 3.9 MB", TOKENIZE, prompt="word " * 780_000, return_token_strs=True)
    yield _json("tokenize one word", TOKENIZE, prompt="x" * 3_900_000)
    yield _json("detokenize 990,000", DETOKENIZE, tokens=[77] * 990_000)
    yield "deep", COMPLETIONS, b'{"prompt":' + b"[" * 15 * MB
    yield "nested 60", COMPLETIONS, b'{"prompt":' + b"[" * 60 + b"]" * 60 + b"}"
    yield "lists in lists", COMPLETIONS, b'{"prompt":[' + b"[]," * 10 * MB + b"[]]}"
    yield "objects", CHATS, b'{"messages":[' + b"{}," * 99_000 + b"{}]}"
    yield "escapes", COMPLETIONS, b'{"prompt":"' + b"\\u00e9" * 5 * MB + b'"}'
    yield "quotes", COMPLETIONS, b'{"prompt":"' + b'\\"' * 15 * MB + b'"}'
    yield "spaces", COMPLETIONS, b" " * 31 * MB
    yield "fields", COMPLETIONS, json.dumps({f"f{n}": 1 for n in range(200_000)}).encode()
    yield "numbers", COMPLETIONS, b'{"prompt":' + b"9" * 30 * MB + b"}"


def of_any_size(seed: int, count: int) -> Iterator[Heavy]:
    """Fields of random kinds, and sizes over five orders of magnitude."""
    draw = random.Random(seed)
    for number in range(count):
        size = int(10 ** draw.uniform(1, 6))
        unit = draw.choice(
            ["a", "a ", "word ", "é", "日本", "\U0001f600", "1234567890 ", "\n", "<|im_end|>"]
        )
        text = (unit * size)[: 4 * size]
        values: list[Any] = [text, [text[:9]] * size, [number] * size, [[1]] * min(size, 90_000)]
        body: dict[str, Any] = {"prompt": "Hi", "max_tokens": 1}
        field = draw.choice(["prompt", "stop", "bad_words", "messages", "tokens", "user", "x"])
        body[field] = draw.choice(values)
        path = draw.choice([COMPLETIONS, CHATS, TOKENIZE, DETOKENIZE])
        yield f"{path} {field} {size}", path, json.dumps(body).encode()
