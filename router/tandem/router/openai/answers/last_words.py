"""The last events of a stream that an error ended, in the format of its API."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope

from tandem.router.openai.answers.chunks import DONE, event
from tandem.router.openai.errors import ErrorAnswer

_KEY = "last_words"


def end_with(scope: Scope, words: Callable[[ErrorAnswer], bytes]) -> None:
    """Have the stream of a request end with ``words`` if it breaks off."""
    scope["state"][_KEY] = words


def last_words(scope: Scope, answer: ErrorAnswer) -> bytes:
    """Return the last events of the request's API, or else OpenAI's error object and the end."""
    words: Callable[[ErrorAnswer], bytes] | None = scope.get("state", {}).get(_KEY)
    return event(answer.content) + DONE if words is None else words(answer)
