"""instructor, in an environment of its own: it wants an older openai package."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import instructor
import openai
import pytest
from instructor.core import InstructorRetryException
from tests.clients.suite import served

covers = partial(pytest.mark.covers, "instructor")
MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]


def asking(mode: Any = instructor.Mode.TOOLS, key: str = served.KEY) -> Any:
    """The package's client over the openai package's."""
    return instructor.from_openai(
        openai.OpenAI(base_url=served.BASE, api_key=key, max_retries=0), mode=mode
    )


def settings(**more: Any) -> Any:
    """A greedy question that is asked once."""
    common = {"model": served.MODEL, "messages": list(served.CHAT), "temperature": 0}
    return {**common, "max_tokens": 200, "max_retries": 0, **more}


@covers("structured output")
@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_of_the_class(mode: Any) -> None:
    found = asking(mode).create(response_model=served.City, **settings())

    assert isinstance(found, served.City)


@covers("usage")
def test_usage() -> None:
    """The completion comes along, with what it cost."""
    found, completion = asking(instructor.Mode.JSON_SCHEMA).create_with_completion(
        response_model=served.City, **settings()
    )

    assert isinstance(found, served.City)
    assert completion.usage.prompt_tokens > 0
    assert completion.usage.total_tokens == (
        completion.usage.prompt_tokens + completion.usage.completion_tokens
    )


@covers("stream")
def test_partial_answers() -> None:
    """Each is a beginning of the last one."""
    parts = list(asking().create_partial(response_model=served.City, **settings()))

    assert len(parts) > 1
    served.City.model_validate(parts[-1].model_dump())


@covers("errors")
def test_errors() -> None:
    """The package wraps what the openai package raises, with the server's words."""
    wrapped = (InstructorRetryException, openai.APIStatusError)
    with pytest.raises(wrapped, match="temperature"):
        asking().create(response_model=served.City, **settings(temperature=-1))
    with pytest.raises(wrapped, match="nobody"):
        asking().create(response_model=served.City, **settings(model="nobody"))
    with pytest.raises(wrapped, match="401"):
        asking(key="wrong").create(response_model=served.City, **settings())


@covers("batch")
async def test_many_at_once() -> None:
    async with openai.AsyncOpenAI(base_url=served.BASE, api_key=served.KEY) as plain:
        client: Any = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
        asked = [client.create(response_model=served.City, **settings()) for _ in range(8)]
        found = await asyncio.gather(*asked)

    assert all(isinstance(each, served.City) for each in found)
