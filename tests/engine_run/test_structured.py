"""Structured output over real weights: every answer matches, and nobody else's tokens change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.engine_run.grammar_draws import VOCAB
from tests.engine_run.patience import time_for_grammars

from tandem.engine.structured.backends.base import Grammar, GrammarBackend
from tandem.engine.structured.backends.guidance import GuidanceBackend
from tandem.engine.structured.constraint import make_mask
from tandem.engine.structured.errors import GrammarError, NoBackend
from tandem.llm import LLM, SamplingParams, StructuredOutputsParams
from tandem.protocol.errors import RequestRefused
from tandem.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Which city is the capital of France?"}]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> GrammarBackend:
    return GuidanceBackend(smollm2, VOCAB)


@pytest.fixture(scope="module")
def llm(small: Path) -> Any:
    settings: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 64}
    settings |= {"device": "cpu"}
    with time_for_grammars(), LLM(str(small), **settings) as llm:
        yield llm


def tokens_of(grammar: Grammar, ends: tuple[int, ...] = ()) -> list[int]:
    words = int.from_bytes(make_mask(grammar, VOCAB, ends), "little")
    return [token for token in range(VOCAB) if words >> token & 1]


def asked(**kind: Any) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(**kind)}


def test_a_grammar_follows_tokens(compiler: GrammarBackend, tokenizer: Tokenizer):
    """Masks are of whole tokens; a copy goes its own way; and keeps its place."""
    grammar = compiler.compile(StructuredOutputsParams(choice=["yes", "no", "yes, sir"]))
    first = tokens_of(grammar, ends=(0,))
    assert {tokenizer.decode([each]) for each in first} == {"y", "ye", "yes", "n", "no"}
    yes = tokenizer.encode("yes", add_special_tokens=False)
    other = grammar.copy()
    grammar.accept(yes)

    assert (grammar.is_accepting, grammar.is_terminated) == (True, False)
    assert 0 in tokens_of(grammar, ends=(0,))
    assert 0 not in tokens_of(grammar)
    assert tokens_of(other, ends=(0,)) == first
    grammar.accept(tokenizer.encode(", sir", add_special_tokens=False))
    assert (grammar.is_accepting, grammar.is_terminated) == (True, True)
    other.accept(tokenizer.encode("no", add_special_tokens=False))
    assert other.is_terminated
    with pytest.raises(GrammarError, match=r"stopped|not allowed"):
        other.accept(yes)


def test_texts_of_choices_are_taken_as_they_are(compiler: GrammarBackend, tokenizer: Tokenizer):
    """Signs of expressions, quotes, line ends and other alphabets mean themselves."""
    texts = ["a.c", "(x|y)*", 'say "hi"\n', "\\d+", "日本", "🙂", " é", "^$", "a/b"]
    grammar = compiler.compile(StructuredOutputsParams(choice=texts))
    for text in texts:
        one = grammar.copy()
        one.accept(tokenizer.encode(text, add_special_tokens=False))
        assert one.is_accepting, text
    with pytest.raises(GrammarError):
        grammar.copy().accept(tokenizer.encode("abc", add_special_tokens=False))


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("(a", "unclosed group"),
        ("a(?=b)", "look-around"),
        (r"(a)\1", "backreferences"),
        ("[a-z]*" * 2000 + "[a-z]{30000}", "limits|parts"),
    ],
)
def test_what_cannot_be_compiled_is_an_error_of_one_line(
    compiler: GrammarBackend, regex: str, words: str
):
    """The backend's words, without its line art."""
    with pytest.raises(GrammarError, match=words) as caught:
        compiler.compile(StructuredOutputsParams(regex=regex))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 300


def test_a_folder_without_a_tokenizer_has_no_compiler(tmp_path: Path):
    """It says so, and so does a broken one."""
    with pytest.raises(NoBackend, match=r"has no tokenizer\.json"):
        GuidanceBackend(tmp_path, VOCAB)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(NoBackend, match=r"tokenizer\.json: "):
        GuidanceBackend(tmp_path, VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ({"choice": ["Paris", "Berlin", "Parma, Italy", "Rome"]}, "Paris|Berlin|Parma, Italy|Rome"),
        ({"regex": r"[A-Z][a-z]{2,8}, \d{3}-\d{4}"}, r"[A-Z][a-z]{2,8}, \d{3}-\d{4}"),
        ({"regex": r"^(yes|no|[0-9]{1,6})$"}, r"yes|no|[0-9]{1,6}"),
        ({"regex": r"[\p{L}é🙂 ]{3,12}!"}, r"[\wªº𝐀-𝟋é🙂 \u0300-\u036f]{3,12}!"),
    ],
)
def test_answers_match_at_temperature_one(llm: LLM, kind: dict[str, Any], pattern: str):
    """Four draws in one batch, two choices each, in full and with filters."""
    params = [
        SamplingParams(temperature=1.0, top_p=top_p, seed=seed, n=2, max_tokens=24, **asked(**kind))
        for seed in range(2)
        for top_p in (1.0, 0.9)
    ]
    outputs = llm.chat([CHAT] * len(params), params, use_tqdm=False)

    for output in outputs:
        for choice in output.outputs:
            if choice.finish_reason == "stop":
                assert re.fullmatch(pattern, choice.text), choice.text
            else:
                assert len(choice.token_ids) == 24
    assert any(c.finish_reason == "stop" for output in outputs for c in output.outputs)


@pytest.mark.slow
def test_greedy_takes_the_best_that_is_allowed(llm: LLM):
    """As scoring every token by hand does: the first token of each choice has the best logit."""
    choices = ["Rome", "Oslo", "Lima"]
    free = llm.chat(CHAT, {"temperature": 0, "max_tokens": 1, "logprobs": 20}, use_tqdm=False)[0]
    bound = llm.chat(
        CHAT, SamplingParams(temperature=0, logprobs=5, **asked(choice=choices)), use_tqdm=False
    )[0]

    answer = bound.outputs[0]
    assert answer.text in choices
    assert free.outputs[0].text not in choices
    assert answer.logprobs is not None
    assert free.outputs[0].logprobs is not None
    # Scores are of what the model said: the same with and without a grammar.
    told, alone = answer.logprobs[0], free.outputs[0].logprobs[0]
    assert [each.token_id for each in told.top] == [each.token_id for each in alone.top[:5]]
    assert told.sampled.rank > 1


@pytest.mark.slow
def test_neighbours_draw_what_they_draw_alone(llm: LLM):
    """Rows without a grammar, in a batch with some: greedy, drawn, and with rules."""
    free = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=1, seed=5, max_tokens=12),
        SamplingParams(temperature=1, seed=6, top_k=20, max_tokens=12, repetition_penalty=1.2),
    ]
    alone = [llm.chat(CHAT, each, use_tqdm=False)[0].outputs[0].token_ids for each in free]
    bound = [SamplingParams(seed=at, max_tokens=20, **asked(regex="[a-z ]+")) for at in range(3)]
    mixed = [each for pair in zip(free, bound, strict=True) for each in pair]
    outputs = llm.chat([CHAT] * len(mixed), mixed, use_tqdm=False)

    assert [output.outputs[0].token_ids for output in outputs[::2]] == alone
    for output in outputs[1::2]:
        assert re.fullmatch("[a-z ]+", output.outputs[0].text)


@pytest.mark.slow
def test_what_else_a_request_asks_holds_within_the_grammar(llm: LLM, tokenizer: Tokenizer):
    """Allowed ids, bias, bad words, min_tokens and stop strings: the grammar goes first."""
    (oslo,) = tokenizer.encode("O", add_special_tokens=False)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"choice": ["Rome", "Oslo"]}, {"allowed_token_ids": [5, 6, 7]}, "Rome|Oslo"),
        ({"choice": ["Rome", "Oslo"]}, {"logit_bias": {oslo: 100.0}}, "Oslo"),
        ({"choice": ["Rome", "Oslo"]}, {"min_tokens": 30}, "Rome|Oslo"),
        ({"choice": ["Rome"]}, {"bad_words": ["Rome", "R", "Ro"]}, "Rome"),
        ({"choice": ["Rome"]}, {"ignore_eos": True}, "Rome"),
        ({"regex": "[a-z]+"}, {"min_tokens": 12, "max_tokens": 30}, "[a-z]{12,}"),
        ({"choice": ["Rome, Italy"]}, {"stop": [", I"]}, "Rome"),
    ]
    params = [
        SamplingParams(**({"temperature": 0, "max_tokens": 40} | more | asked(**kind)))
        for kind, more, _ in cases
    ]
    outputs = llm.chat([CHAT] * len(params), params, use_tqdm=False)

    for output, (_, more, pattern) in zip(outputs, cases, strict=True):
        assert re.fullmatch(pattern, output.outputs[0].text), (more, output.outputs[0].text)
        if "max_tokens" not in more:
            assert output.outputs[0].finish_reason == "stop", more


@pytest.mark.slow
def test_a_wrong_expression_is_refused_by_name(llm: LLM):
    """The engine's refusal reaches whoever asked, and the next request runs."""
    with pytest.raises(RequestRefused) as caught:
        llm.chat(CHAT, SamplingParams(**asked(regex="(a")), use_tqdm=False)

    assert caught.value.refusal.param == "structured_outputs.regex"
    assert "unclosed group" in str(caught.value)
    for regex, words in (
        (r"[^\s\S]", "text matches"),
        ("(a?){0}", "no text of a token or more"),
    ):
        with pytest.raises(RequestRefused, match=words):
            llm.chat(CHAT, SamplingParams(**asked(regex=regex)), use_tqdm=False)
    assert llm.chat(CHAT, SamplingParams(**asked(choice=["ok"])), use_tqdm=False)[0].outputs
