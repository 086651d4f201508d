"""What one request may hold: bounds that are named, and a loop that turns whatever comes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.fake_worker import FakeWorker, Turn, serve_well
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.router.api.openai import chat, completions
from tandem.router.api.openai.bodies.bounds import SLICE_BYTES, check_shape
from tandem.router.http.errors import HttpProblem

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
TEXT: Any = {"model": "fake", "prompt": "Hi", "max_tokens": 1}
CHAT: Any = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


OVER: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {**TEXT, "prompt": ["a"] * 257}, "prompt", "256"),
    (COMPLETIONS, {**TEXT, "prompt": ["a"] * 20_000}, "prompt", "256"),
    (COMPLETIONS, {**TEXT, "prompt": ["a"] * 9, "n": 120}, "n", "1024"),
    (COMPLETIONS, {**TEXT, "bad_words": ["a"] * 1001}, "bad_words", "1000"),
    (COMPLETIONS, {**TEXT, "bad_words": ["a"] * 100_000}, "bad_words", "1000"),
    (COMPLETIONS, {**TEXT, "bad_words": ["a" * 257]}, "bad_words", "256"),
    (COMPLETIONS, {**TEXT, "bad_words": ["😀" * 100]}, "bad_words", "64"),
    (COMPLETIONS, {**TEXT, "stop": ["a" * 1025]}, "stop", "1024"),
    (COMPLETIONS, {**TEXT, "stop": ["a"] * 50_000}, "stop", "1024"),
    (COMPLETIONS, {**TEXT, "stop": "a" * 1_000_000}, "stop", "1024"),
    (COMPLETIONS, {**TEXT, "stop_token_ids": [1] * 1025}, "stop_token_ids", "1024"),
    (
        COMPLETIONS,
        {**TEXT, "logit_bias": {str(each): 1 for each in range(1025)}},
        "logit_bias",
        "1024",
    ),
    (COMPLETIONS, {**TEXT, "allowed_token_ids": [1] * 60_000}, "allowed_token_ids", "50000"),
    (COMPLETIONS, {**TEXT, "prompt": "a" * 4_000_001}, "prompt", "2048"),
    (CHATS, {**CHAT, "messages": CHAT["messages"] * 4097}, "messages", "4096"),
    (CHATS, {**CHAT, "documents": [{}] * 2049}, "documents", "2048"),
    ("/tokenize", {"prompt": "a" * 4_000_001}, "prompt", "4000000"),
    ("/tokenize", {"messages": CHAT["messages"] * 4097}, "messages", "4096"),
]


@pytest.mark.parametrize("case", range(len(OVER)))
def test_every_list_has_a_bound(well: Served, case: int) -> None:
    """400 with the field, a little of the value, and the limit."""
    path, body, param, limit = OVER[case]
    answer = well.post(path, json=body)

    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert limit in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.full
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b'{"prompt":' + b"[" * 65 + b"]" * 65 + b"}", 400, "body_too_deep"),
        (b'{"messages":' + b'{"a":' * 90_000, 400, "body_too_deep"),
        (b'{"prompt":[' + b"1," * 1_000_001 + b"1]}", 413, "request_too_large"),
        (b'{"tokens":[' + b'"",' * 1_000_001 + b"1]}", 413, "request_too_large"),
        (b'{"messages":[' + b"{}," * 100_001 + b"{}]}", 413, "request_too_large"),
        (b'{"a":"' + b"x" * (32 << 20) + b'"}', 413, "request_too_large"),
    ],
    ids=["deep", "deeper", "numbers", "texts", "objects", "bytes"],
)
def test_a_body_has_bounds_inside(
    well: Served, path: str, content: bytes, status: int, code: str
) -> None:
    """Its depth, its values and its bytes, whatever the fields are."""
    answer = well.post(path, content=content)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\[]{},:\n', max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text('x"\\', max_size=3), inner),
    max_leaves=40,
)


def size_of(value: object) -> tuple[int, int]:
    """Values (an object's members count twice, an empty container as one) and depth."""
    if isinstance(value, list):
        inner = [size_of(each) for each in value]
        return sum(count for count, _ in inner) + (not inner) + 1, 1 + max(
            (depth for _, depth in inner), default=0
        )
    if isinstance(value, dict):
        inner = [size_of(each) for each in value.values()]
        count = sum(count + 1 for count, _ in inner) + (not inner) + 1
        return count, 1 + max((depth for _, depth in inner), default=0)
    return 1, 0


@given(json_values, st.integers(1, 9))
def test_the_count_of_a_body_is_exact(value: object, cut: int) -> None:
    """Texts count as what they are, however they look inside and wherever slices end."""
    body = json.dumps(value).encode()
    count, depth = size_of(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.router.api.openai.bodies.bounds.SLICE_BYTES", cut)
        patch.setattr("tandem.router.api.openai.bodies.bounds.CONTAINER_SHARE", 1)
        check_shape(body, max_values=count, max_depth=depth)
        with pytest.raises(HttpProblem):
            check_shape(body, max_values=count - 1, max_depth=depth)
        if depth:
            with pytest.raises(HttpProblem):
                check_shape(body, max_values=count, max_depth=depth - 1)


def test_brackets_in_a_text_are_no_lists() -> None:
    """A chat may quote as much JSON as it likes."""
    quoted = json.dumps({"content": json.dumps([[{"a": "b"}] * 9] * 9) * 3_000}).encode()
    assert len(quoted) > 4 * SLICE_BYTES
    check_shape(quoted, max_values=10, max_depth=2)


class Ticks:
    """Counts the turns of a server's loop that come late or not at all while others work."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.count = 0
        self._loop = loop
        self._ended = False
        loop.call_soon_threadsafe(self._tick)

    def _tick(self) -> None:
        self.count += 1
        if not self._ended:
            self._loop.call_later(0.001, self._tick)

    def end(self) -> None:
        self._ended = True


HEAVY = {
    "prompts": (COMPLETIONS, {**TEXT, "prompt": ["a b c"] * 256}),
    "bad words": (COMPLETIONS, {**TEXT, "bad_words": [f"word {n}" for n in range(1000)]}),
    "ids": (COMPLETIONS, {**TEXT, "prompt": [1] * 900_000}),
    "text": (COMPLETIONS, {**TEXT, "prompt": "many words " * 100_000}),
    "tokenize": ("/tokenize", {"prompt": "many words " * 100_000, "return_token_strs": True}),
    "messages": (CHATS, {**CHAT, "messages": [{"role": "user", "content": "Hi there"}] * 4096}),
    "detokenize": ("/detokenize", {"tokens": [77] * 900_000}),
    "allowed": (COMPLETIONS, {**TEXT, "allowed_token_ids": list(range(49_000))}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", HEAVY)
def test_the_loop_turns_while_a_heavy_request_is_looked_at(well: Served, name: str) -> None:
    """Whatever becomes of it, others got many turns meanwhile, and no worker was lost."""
    path, body = HEAVY[name]
    greeted = [worker.num_greeted for worker in well.workers]
    ticks = Ticks(well.app.state.router.pool._ticker.get_loop())
    wait_for(lambda: ticks.count)
    before = ticks.count
    answer = httpx.post(well.url + path, json=body, timeout=20)  # its set-up is among the turns
    turns = ticks.count - before
    ticks.end()

    assert answer.status_code in (200, 400)
    assert turns >= 10
    assert [worker.num_greeted for worker in well.workers] == greeted


LONG: Any = {"role": "user", "content": "Hi " * 60}
LISTED: Any = {**CHAT, "messages": [LONG], "n": 4, "max_tokens": 30}
SCORED: Any = {**TEXT, "prompt": "Hi " * 60, "n": 4, "max_tokens": 30}
WRITTEN: dict[str, tuple[str, Any, ModuleType, str, str]] = {
    "chat": (CHATS, {**LISTED, "logprobs": True}, chat, "chat_logprobs", "top_logprobs"),
    "chat's prompt": (CHATS, LISTED, chat, "prompt_logprobs", "prompt_logprobs"),
    "completion": (COMPLETIONS, SCORED, completions, "completion_logprobs", "logprobs"),
    "echo": (
        COMPLETIONS,
        {**SCORED, "echo": True, "stream": True, "n": 1},
        completions,
        "completion_logprobs",
        "logprobs",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_many_log_probabilities_are_written_in_a_thread(
    well: Served, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Those of a whole answer, and those of a prompt before its first token; few are not."""
    path, body, module, function, param = WRITTEN[name]
    threads: list[str] = []
    write = getattr(module, function)

    def written(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return write(*given)

    monkeypatch.setattr(module, function, written)
    for count, is_beside in ((20, True), (0, False)):
        threads.clear()
        answer = well.post(path, json={**body, param: count})
        assert answer.status_code == 200, answer.text
        assert threads[0].startswith("beside") is is_beside


def test_many_prompts_of_one_call_take_turns(serve: Serve, decode: Make) -> None:
    """So many at a time as one call may have; another's single prompt does not wait for them."""
    running: set[object] = set()
    most = 0
    lock = threading.Lock()
    go = threading.Event()

    def held(turn: Turn) -> Iterator[float]:
        nonlocal most
        with lock:
            running.add(turn.key)
            most = max(most, len(running))
        while len(turn.request.prompt_token_ids) == 4 and not go.is_set():
            yield 0.005
        yield from serve_well(turn)
        running.discard(turn.key)

    d = decode(behaviour=held)
    served = serve(d, max_parallel_prompts=8)
    many = {**TEXT, "prompt": ["many"] * 40}
    with httpx.Client(timeout=20) as client:
        batch = threading.Thread(
            target=lambda: client.post(served.url + COMPLETIONS, json=many).raise_for_status()
        )
        batch.start()
        wait_for(lambda: len(running) == 8)
        assert served.post(COMPLETIONS, json=TEXT).status_code == 200
        go.set()
        batch.join()

    assert len(d.submitted) == 41
    assert most <= 9
