"""A grammar that reaches a limit is its client's error: the worker goes on, and has no fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine_run.grammar_draws import VOCAB
from tests.engine_run.patience import time_for_grammars

from tandem.engine.structured.backends.guidance import GuidanceBackend, check_multiples
from tandem.engine.structured.errors import GrammarError
from tandem.llm import LLM, SamplingParams, StructuredOutputsParams
from tandem.protocol.errors import RefusalCode, RequestRefused

pytestmark = pytest.mark.full

WIDE = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(600)}}
"""Properties that are optional, all in one place."""


def _doubled(name: str, levels: int) -> str:
    """A grammar in Lark's syntax in which each of its rules, or terminals, has two of the next."""
    rules = [f"{name}{at}: {name}{at + 1} {name}{at + 1}" for at in range(levels)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{levels}: "x"'])


BEYOND = {
    "optional properties": {"json": json.dumps(WIDE)},
    "nested optional properties": {
        "json": json.dumps({"type": "object", "properties": {"a": WIDE}, "required": ["a"]})
    },
    "schema in a grammar": {"grammar": f"start: %json {json.dumps(WIDE)}"},
    "schema in a tag": {
        "structural_tag": json.dumps(
            {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": WIDE}}
        )
    },
    "doubled rules": {"grammar": _doubled("r", 40)},
    "doubled terminals": {"grammar": _doubled("T", 24)},
    "repeated rule": {"grammar": 'start: ("a" "b"){1000000}'},
    "repetition": {"regex": "a{1000000}"},
    "ten digits": {"regex": "a{99999999999}"},
    "multiples": {"json": '{"type": "integer", "multipleOf": 99999989}'},
}


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    settings: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 64}
    settings |= {"device": "cpu", "structured_outputs_backend": "guidance"}
    with time_for_grammars(), LLM(str(smollm2), **settings) as llm:
        yield llm


@pytest.mark.parametrize("form", BEYOND.values(), ids=BEYOND)
def test_what_reaches_a_limit_is_refused_by_its_field(llm: LLM, form: dict[str, Any]):
    """A failure would count against the worker; the next request is answered."""
    wanted = StructuredOutputsParams(**form)
    with pytest.raises(RequestRefused) as caught:
        llm.generate("Say", SamplingParams(max_tokens=64, structured_outputs=wanted))

    refusal = caught.value.refusal
    assert refusal.code is RefusalCode.INVALID
    assert refusal.param == f"structured_outputs.{wanted.kind}"
    (answer,) = llm.generate("Say", SamplingParams(max_tokens=2))
    assert len(answer.outputs[0].token_ids) == 2


def test_a_limit_is_named_with_its_number(smollm2: Path):
    """The client learns how far beyond it is."""
    grammar = GuidanceBackend(smollm2, VOCAB).compile(
        StructuredOutputsParams(json=json.dumps(WIDE))
    )
    with pytest.raises(GrammarError, match=r"reaches a limit: .* 2407 items; max is 2000$"):
        grammar.accept((107,))  # {


@pytest.mark.parametrize(
    "values", [(99999989,), (1e-300 * 7919 * 7919,), (9973, 9967), (12345.678,)], ids=str
)
@pytest.mark.parametrize("place", ["json", "grammar", "structural_tag"])
def test_multiples_that_take_too_many_states_are_refused_before_they_compile(
    values: tuple[float, ...], place: str
):
    """Wherever the schema stands: the backend has no bound for them."""
    schema = json.dumps({"type": "number", "allOf": [{"multipleOf": each} for each in values]})
    texts: dict[str, Any] = {
        "json": schema,
        "grammar": f"start: a\na: %json {schema}",
        "structural_tag": f'{{"format": {{"type": "json_schema", "json_schema": {schema}}}}}',
    }
    with pytest.raises(GrammarError, match=r"common multiple of at most 10,000"):
        check_multiples(StructuredOutputsParams(**{place: texts[place]}))


@pytest.mark.parametrize("value", [0.01, 5, 7, 60, 100, 365, 86400, 1e6, 1e-9, 0.0])
def test_usual_multiples_are_followed(value: float):
    """Factors of 2 and 5 cost nothing."""
    check_multiples(StructuredOutputsParams(json=json.dumps({"multipleOf": value})))
