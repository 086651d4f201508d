"""Structured output over a hand-off, with real weights: both halves follow one grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine_run.patience import SECONDS, time_for_grammars
from tests.workers.pair import ROUTER, Pair

from tandem.engine.structured.process import PREPARED
from tandem.protocol.errors import FailCause, RefusalCode
from tandem.protocol.ids import RequestKey
from tandem.protocol.requests import EngineCoreRequest, Produce
from tandem.protocol.sampling import SamplingParams
from tandem.protocol.structured import StructuredOutputsParams
from tandem.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.full, pytest.mark.slow]

PHONE = StructuredOutputsParams(regex=r"\d{3}-\d{4}")


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def pair(smollm2: Path) -> Iterator[Pair]:
    """A linked pair of engines with the embedded model."""
    with time_for_grammars():
        made = Pair(engine={"folder": smollm2, "max_model_len": 256})
        made.seconds = SECONDS
        yield made
        made.close()


def ends(pair: Pair, name: str, n: int = 1) -> bool:
    """Whether every choice has ended on D, and nothing is held."""
    done = all(pair.decode.finished(name, choice) for choice in range(n))
    return done and pair.prefill.free and pair.decode.free


@pytest.mark.parametrize(
    "backend", [None, *(pytest.param(name, marks=pytest.mark.nightly) for name in PREPARED)]
)
def test_token_1_of_p_and_the_rest_of_d_match(
    pair: Pair, tokenizer: Tokenizer, backend: str | None
) -> None:
    """Two choices: P's first tokens are D's, the whole matches, and equals one engine's."""
    prompt = tokenizer.encode("My number is ")
    wanted = msgspec.structs.replace(PHONE, backend=backend)
    params: dict[str, Any] = {"temperature": 1.0, "seed": 7, "n": 2, "structured_outputs": wanted}
    name = f"a {backend}"
    pair.ask(name, prompt, budget_ms=int(1000 * SECONDS), **params)  # both halves load a library
    pair.until(lambda: ends(pair, name, 2))

    said = [pair.decode.tokens(name, choice) for choice in range(2)]
    assert [pair.prefill.tokens(name, choice) for choice in range(2)] == [each[:1] for each in said]
    assert all(re.fullmatch(r"\d{3}-\d{4}", tokenizer.decode(each)) for each in said)
    pair.decode.outputs.clear()
    assert pair.alone(prompt, **params) == said


def test_an_answer_of_one_token_ends_with_p(pair: Pair, tokenizer: Tokenizer) -> None:
    """No KV is brought for it, and both say that it stopped."""
    wanted = StructuredOutputsParams(choice=["!"])
    pair.ask("one", tokenizer.encode("Well?"), structured_outputs=wanted)
    pair.until(lambda: ends(pair, "one"))

    for half in (pair.prefill, pair.decode):
        (output,) = [each for each in half.outputs if each.request == "one"]
        assert output.finish == "stop"
    assert tokenizer.decode(pair.decode.tokens("one")) == "!"


def test_a_second_attempt_goes_on_within_the_grammar(pair: Pair, tokenizer: Tokenizer) -> None:
    """Tokens that a client has seen are followed by both halves before they draw."""
    prompt = tokenizer.encode("My number is ")
    seen = tokenizer.encode("555-1", add_special_tokens=False)
    pair.ask("again", prompt, emitted=[seen], temperature=1.0, structured_outputs=PHONE)
    pair.until(lambda: ends(pair, "again"))

    assert re.fullmatch(r"\d{3}", tokenizer.decode(pair.decode.tokens("again")))
    assert next(o.position for o in pair.decode.outputs if o.request == "again") == len(seen)


def test_both_halves_refuse_what_does_not_compile(pair: Pair, tokenizer: Tokenizer) -> None:
    """Whoever speaks first, the router hears the same words; nothing is held. One half may hear
    that the other has let go before it has looked itself: the other's words are there then."""
    wanted = StructuredOutputsParams(regex="(a")
    pair.ask("wrong", tokenizer.encode("Hi"), structured_outputs=wanted)
    halves = (pair.prefill, pair.decode)
    pair.until(lambda: all(half.refused or half.failed for half in halves))
    pair.until(lambda: pair.prefill.free and pair.decode.free)

    told = [each.refusal for half in halves for each in half.refused]
    assert told, "nobody says why"
    assert all(each == told[0] for each in told)
    assert told[0].code is RefusalCode.INVALID
    assert told[0].param == "structured_outputs.regex"
    for half in halves:
        assert [each.cause for each in half.failed] in ([], [FailCause.GONE])
        half.failed.clear()


def test_a_producer_alone_draws_under_the_grammar(pair: Pair, tokenizer: Tokenizer) -> None:
    """Before any consumer has asked: P compiles by itself."""
    request = EngineCoreRequest(
        key=RequestKey(ROUTER, "p", 0),
        prompt_token_ids=tokenizer.encode("Say it:"),
        params=SamplingParams(temperature=1.0, seed=1, structured_outputs=PHONE),
        kv=Produce(pair.d_id),
        budget_ms=60_000,
    )
    assert pair.prefill.core.add(request) is None
    pair.until(lambda: bool(pair.prefill.tokens("p")))

    assert re.fullmatch(r"\d+", tokenizer.decode(pair.prefill.tokens("p")))
    pair.prefill.core.abort(request.key)
    pair.until(lambda: pair.prefill.free)
