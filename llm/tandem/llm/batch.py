"""Generation of a batch: parameters of each prompt, and the loop that runs the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from tandem.llm import params
from tandem.llm.llm_engine import LLMEngine, QueuedItem
from tandem.llm.outputs import RequestOutput
from tandem.llm.progress import BatchProgress
from tandem.llm.sampling import Params, params_from
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import OutputKind, SamplingParams
from tandem.text.input_processor import InputOptions

Messages = Sequence[Mapping[str, Any]]

Add = Callable[[str], None]
"""Function that adds one request to the engine, under an id."""


def run_batch(
    engine: LLMEngine,
    adders: Iterable[Add],
    names: Iterator[str],
    progress: BatchProgress,
    *,
    total: int,
    at_once: int,
) -> list[RequestOutput]:
    """Return the answers to ``total`` requests in order, with ``at_once`` of them in the engine.

    Their ids are unused ``names``. Outputs of other requests are kept for the next ``step``. Raises
    the first error, with the ``answers`` until then; the rest is aborted.
    """
    waiting = enumerate(adders)
    answers: dict[int, RequestOutput] = {}
    running: dict[str, int] = {}
    others: list[QueuedItem] = []
    try:
        while len(answers) < total:
            for index, add in islice(waiting, at_once - len(running)):
                name = next(each for each in names if not engine.knows(each))
                running[name] = index  # before adding: Ctrl-C may come in between
                add(name)
            items = engine.take()
            others += [each for each in items if each[0] not in running]
            for name, item in items:
                if (place := running.pop(name, None)) is None:
                    continue
                if isinstance(item, Exception):
                    raise item
                answers[place] = item
                progress.done(item.num_generated_tokens)
    except Exception as error:
        error.answers = answers  # type: ignore[attr-defined]  # of whatever kind it is
        raise
    finally:
        engine.put_back(others)
        engine.abort_request(running)
    return [answers[index] for index in range(total)]


def one_each(
    given: Params | Sequence[Params], count: int
) -> tuple[list[Params], list[InputOptions | None]]:
    """Return verified parameters and options of each request, for answers at its end."""
    if not isinstance(given, Sequence):
        return [_at_the_end(given)] * count, [options_of(given)] * count
    if len(given) != count:
        raise InvalidParameter(
            "sampling_params", f"{len(given)} of them", f"one, or one for each of {count}"
        )
    return [_at_the_end(each) for each in given], [options_of(each) for each in given]


def chats_of(messages: Messages | Sequence[Messages]) -> list[Any]:
    """Return a list of chats; a single chat is one, checked when it is rendered."""
    several = (
        isinstance(messages, Sequence)
        and len(messages) > 0
        and all(isinstance(each, Sequence) and not isinstance(each, str) for each in messages)
    )
    return list(messages) if several else [messages]


def options_of(given: Params) -> InputOptions | None:
    """Return options with the default number of tokens if ``given`` has none."""
    if isinstance(given, params.SamplingParams):
        is_open = given.max_tokens == params.DEFAULT_MAX_TOKENS
    else:
        is_open = not isinstance(given, SamplingParams) and "max_tokens" not in (given or {})
    return InputOptions(default_max_tokens=params.DEFAULT_MAX_TOKENS) if is_open else None


def _at_the_end(given: Params) -> Params:
    checked = params_from(given)
    if isinstance(given, SamplingParams):
        if options_of(given) is not None:
            checked = msgspec.structs.replace(checked, max_tokens=None)
        return msgspec.structs.replace(checked, output_kind=OutputKind.FINAL_ONLY)
    return {**(given or {}), "output_kind": OutputKind.FINAL_ONLY}
