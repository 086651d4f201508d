"""Fields that no parameter has for a name: refused with a hint, or let pass and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served

from tandem.protocol.errors import InvalidParameter
from tandem.router.api.openai.bodies.hints import MAX_NAMES, UnknownFields

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "extra", "message"),
    [
        ("/v1/chat/completions", {"temperture": 0.5}, "temperture: 0.5 .*did you mean temperature"),
        ("/v1/chat/completions", {"extra_body": {}}, "extra_body: {} is not allowed; no parameter"),
        ("/v1/chat/completions", {"suffix": "x"}, 'suffix: "x" is not allowed; no parameter'),
        ("/v1/completions", {"prompt": "x", "messages": []}, r"messages: \[\] is not allowed"),
        (
            "/v1/chat/completions",
            {"stream": True, "stream_options": {"include_use": True}},
            "stream_options.include_use: true .*did you mean stream_options.include_usage",
        ),
        ("/tokenize", {"prompt": "x", "prompts": "x"}, 'prompts: "x" .*did you mean prompt'),
        ("/tokenize", {"prompt": "x", "tools": [{"a": 1}]}, "tools: .*only together with messages"),
        ("/detokenize", {"tokens": [1], "skip": True}, "skip: true is not allowed"),
    ],
)
def test_a_misspelt_parameter_is_refused(
    well: Served, path: str, extra: dict[str, Any], message: str
) -> None:
    """With its name, its value and the nearest right name, on every path that takes a body."""
    answer = well.post(path, json={**(CHAT if "chat" in path else {}), **extra})

    assert answer.status_code == 400
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(answer.json()["error"]["message"])


def test_a_long_name_is_not_repeated(well: Served) -> None:
    """A client's name of a megabyte is no message of a megabyte."""
    answer = well.post("/v1/chat/completions", json={**CHAT, "x" * 1_000_000: 1})

    assert answer.status_code == 400
    assert len(answer.content) < 500


def test_a_flag_lets_them_pass(
    serve: Callable[..., Served], decode: Callable[..., FakeWorker]
) -> None:
    """Unknown names only: what is known and not done is refused all the same."""
    served = serve(decode(), ignore_unknown_fields=True)
    passed = served.post("/v1/chat/completions", json={**CHAT, "temperture": 0.5})
    refused = served.post("/v1/chat/completions", json={**CHAT, "use_beam_search": True})

    assert passed.status_code == 200
    assert refused.status_code == 400


def test_the_log_names_few_of_them_once_and_escaped(caplog: pytest.LogCaptureFixture) -> None:
    """Strangers choose these names: no newline, no flood, no novel."""
    unknown = UnknownFields(ignored=True)
    with caplog.at_level(logging.WARNING):
        for number in range(10 * MAX_NAMES):
            unknown.meet("", f"forged\nline é {number} " + "x" * 500, 1, ())
            unknown.meet("", f"forged\nline é {number} " + "x" * 500, 1, ())

    assert len(caplog.messages) == MAX_NAMES
    assert all(message.isascii() and message.isprintable() for message in caplog.messages)
    assert max(map(len, caplog.messages)) < 200


def test_no_hint_where_nothing_is_near() -> None:
    """A hint that is far off helps nobody."""
    with pytest.raises(InvalidParameter, match=r"no parameter has this name$"):
        UnknownFields().meet("", "qqqqqqqq", 1, ("temperature", "top_p"))
