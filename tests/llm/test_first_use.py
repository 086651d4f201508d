"""A program written for another engine, with the import changed, runs as it did there."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine_plan.sim import SimExecutor

from tandem import LLM, PoolingParams, SamplingParams, StructuredOutputsParams
from tandem.llm.params import wire
from tandem.llm.sampling import params_from
from tandem.protocol import sampling
from tandem.protocol.errors import InvalidParameter
from tandem.router.api.openai.bodies.schemas import CompletionBody


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    """The embedded model's folder and a pretended model."""
    with LLM(
        model=str(smollm2),
        executor=SimExecutor(64),
        device="cpu",
        block_size=16,
        dtype="float",
        max_model_len=256,
    ) as llm:
        yield llm


@pytest.mark.parametrize("params", [None, {}, {"ignore_eos": True}, SamplingParams()])
def test_an_answer_has_sixteen_tokens_unless_told_otherwise(llm: LLM, params: Any):
    """In a program as over HTTP: nobody waits for the rest of a context."""
    outputs = llm.generate(["a", "b"], params)
    assert all(output.num_generated_tokens <= 16 for output in outputs)
    chats = llm.chat([{"role": "user", "content": "hi"}], params)
    assert chats[0].num_generated_tokens <= 16
    assert SamplingParams().max_tokens == CompletionBody.DEFAULT_MAX_TOKENS == 16


def test_the_default_gives_way_to_the_context(llm: LLM):
    """A prompt that leaves room for fewer is answered; what is asked for is asked for."""
    prompt = [5] * 250
    open_ended = SamplingParams(ignore_eos=True)
    assert llm.generate(prompt, open_ended)[0].num_generated_tokens == 6
    rest = SamplingParams(ignore_eos=True, max_tokens=None)
    assert llm.generate([5] * 200, rest)[0].num_generated_tokens == 56
    with pytest.raises(InvalidParameter, match="max_tokens"):
        llm.generate(prompt, SamplingParams(max_tokens=17))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": 3}, "temperature: 3.0 is not allowed; a number from 0 to 2"),
        ({"temperature": "hot"}, "temperature: 'hot' is not allowed"),
        ({"top_p": 0}, "top_p: 0"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n: 0"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"min_tokens": 20}, "min_tokens: 20 is not allowed; at most max_tokens, which is 16"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": -2}, "logprobs"),
        ({"seed": 2**64}, "seed"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"logit_bias": {1: 1000.0}}, "logit_bias"),
        ({"temperatur": 1}, "SamplingParams has no option 'temperatur'; the nearest is 'temp"),
        ({"best_of": 2}, "no option 'best_of'; it has allowed_token_ids, "),
        ({"structured_outputs": {"jsn": {}}}, "no option 'jsn'; the nearest is 'json'"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ],
)
def test_bad_values_are_refused_when_parameters_are_made(given: dict[str, Any], said: str):
    """Not by the first call that uses them; a ValueError, as elsewhere."""
    with pytest.raises(ValueError) as refused:  # noqa: PT011  its text is looked at
        SamplingParams(**given)
    assert said in str(refused.value)


def test_an_unknown_option_is_a_type_error_too():
    for kind in (SamplingParams, PoolingParams, StructuredOutputsParams):
        with pytest.raises(TypeError, match=f"{kind.__name__} has no option 'anything'"):
            kind(anything=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidParameter, match="dimensions"):
        PoolingParams(dimensions=0)


def test_lists_and_texts_are_taken_as_they_are():
    given = SamplingParams(
        stop="x", stop_token_ids=[1, 2], bad_words=["no"], allowed_token_ids=[3], logit_bias={5: 1}
    )
    expected = sampling.SamplingParams(
        max_tokens=16,
        stop=("x",),
        stop_token_ids=(1, 2),
        bad_words=("no",),
        allowed_token_ids=(3,),
        logit_bias={5: 1.0},
    )
    assert wire(given) == params_from(given) == expected
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams.from_optional(temperature=None, top_k=3).top_k == 3


@pytest.mark.parametrize(
    "given",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"json": '{"type": "object"}'},
        {"json_object": True},
        {"choice": ("a", "b")},
        {"regex": "a+"},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}},
    ],
)
def test_forms_are_given_as_dicts_or_texts(given: dict[str, Any]):
    form = StructuredOutputsParams(**given)
    sent = wire(SamplingParams(structured_outputs=form)).structured_outputs
    assert sent is not None
    ((name, value),) = given.items()
    found = getattr(sent, name)
    if isinstance(value, dict):
        assert json.loads(found) == value
    else:
        assert found == (list(value) if isinstance(value, tuple) else value)


def test_objects_are_closed_where_that_is_asked_for():
    inner = {"type": "object", "properties": {"b": {}}}
    schema = {"properties": {"a": inner}, "$defs": {"o": {"properties": {}}}}
    form = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    closed = json.loads(form.json)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
    assert closed["$defs"]["o"]["additionalProperties"] is False


def test_logprobs_are_a_mapping_of_token_ids(llm: LLM):
    """With ``logprob``, ``rank`` and ``decoded_token``, of answers and of prompts."""
    params = SamplingParams(logprobs=2, prompt_logprobs=1, max_tokens=3, ignore_eos=True)
    output = llm.generate("hello there", params)[0]
    answer = output.outputs[0]
    assert answer.logprobs is not None
    for token_id, position in zip(answer.token_ids, answer.logprobs, strict=True):
        drawn = position[token_id]
        assert {drawn.logprob, drawn.rank, drawn.decoded_token}
        assert position.get(-1) is None
        assert dict(position.items())[token_id] == drawn
        assert 2 <= len(position) <= 3
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    for token_id, found in list(pairs)[1:]:
        assert found is not None
        assert token_id in found


def test_a_chat_takes_tools_and_names_for_its_template(llm: LLM):
    """One by one, or as ``ChatOptions``; not both."""
    messages = [{"role": "user", "content": "hi"}]
    template = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ colour }}"
    tools = [{"type": "function", "function": {"name": "weather"}}]
    output = llm.chat(
        messages, tools=tools, chat_template=template, chat_template_kwargs={"colour": "red"}
    )[0]
    assert output.prompt == "weatherred"


def test_methods_of_habit_are_there(llm: LLM):
    """The tokenizer, the cache, the defaults."""
    llm.generate("hello there " * 20)
    assert llm.reset_prefix_cache()
    assert llm.generate("hello there " * 20)[0].num_cached_tokens == 0
    assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("hello")) == "hello"
    assert isinstance(llm.get_default_sampling_params(), SamplingParams)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_modl_len": 8}, "LLM has no option 'max_modl_len'; the nearest is 'max_model_len'"),
        ({"dtype": "int4"}, "dtype: 'int4' is not allowed; one of auto, float32"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size: 5 is not allowed; a divisor of"),
        ({"quantization": "awq"}, "quantization: 'awq' is not allowed; one of auto, fp8"),
        ({"enable_lora": True}, "adapters are not served"),
        ({"hf_overrides": {"num_attention_heads": 0}}, "num_attention_heads: 0"),
        ({"hf_overrides": "[1]"}, "hf_overrides"),
        (
            {"chat_template": "nowhere.jinja"},
            "chat_template: 'nowhere.jinja' is neither a file here",
        ),
        ({"generation_config": "/nowhere"}, "generation_config: '/nowhere'"),
    ],
)
def test_options_that_cannot_be_are_refused_before_an_engine_is_made(
    smollm2: Path, options: dict[str, Any], said: str
):
    """Each names itself and what is near."""
    with pytest.raises(Exception) as refused:  # noqa: PT011  of several kinds
        LLM(str(smollm2), **options)
    assert said in str(refused.value)


def test_options_that_need_nothing_are_accepted_with_a_line(
    smollm2: Path, caplog: pytest.LogCaptureFixture
):
    """Options of other engines, by one table."""
    needless: dict[str, Any] = {
        "trust_remote_code": True,
        "swap_space": 4,
        "task": "generate",
        "enable_lora": False,
        "disable_log_stats": True,
    }
    with (
        caplog.at_level(logging.WARNING),
        LLM(str(smollm2), executor=SimExecutor(8), device="cpu", block_size=16, **needless) as llm,
    ):
        assert llm.generate("a", SamplingParams(max_tokens=1))
    warned = [each.message for each in caplog.records if "has no effect" in each.message]
    assert len(warned) == 4


def test_files_of_the_model_are_replaced(smollm2: Path, tmp_path: Path):
    """Template, defaults and config; the model's own folder stays as it is."""
    own = sorted(each.name for each in smollm2.iterdir())
    template = tmp_path / "mine.jinja"
    template.write_text("<{{ messages[0].content }}>")
    with LLM(
        str(smollm2),
        executor=SimExecutor(8),
        device="cpu",
        block_size=16,
        tokenizer=str(smollm2),
        chat_template=str(template),
        hf_overrides={"max_position_embeddings": 64},
        override_generation_config={"temperature": 0.25, "max_new_tokens": 2},
    ) as llm:
        assert llm.card.max_model_len == 64
        output = llm.chat([{"role": "user", "content": "x"}], {"ignore_eos": True})[0]
        assert output.prompt == "<x>"
        assert output.num_generated_tokens == 2
        assert llm.get_default_sampling_params().temperature == 0.25
    assert sorted(each.name for each in smollm2.iterdir()) == own
