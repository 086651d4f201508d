"""Values that a model does not close end where the call ends, and swallow nothing that follows."""

from __future__ import annotations

import pytest
from tests.text.test_parsers import Said, read

G = [("g", {"a": "b"})]

TAGGED = {
    "qwen3_xml": (
        "<tool_call>\n<function={}>\n",
        "<parameter={}>\n{}",
        "\n</parameter>\n",
        ["</function>\n", "</tool_call>"],
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function={}>\n",
        "<parameter={}>{}",
        "</parameter>\n",
        ["</function>\n", "</seed:tool_call>"],
    ),
    "glm45": (
        "<tool_call>{}\n",
        "<arg_key>{}</arg_key>\n<arg_value>{}",
        "</arg_value>\n",
        ["</tool_call>"],
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="{}">\n',
        '<parameter name="{}">{}',
        "</parameter>\n",
        ["</invoke>\n", "</minimax:tool_call>"],
    ),
}
"""What begins a call, what is a parameter, what ends its value, and what ends the call."""
SAME = {"qwen3_coder": "qwen3_xml", "nemotron_v3": "qwen3_xml", "glm47": "glm45"}


def check(text: str, name: str) -> Said:
    """What a text says, in one piece and cut at every place."""
    said = read([text], name)
    assert read(list(text), name) == said
    for at in range(1, len(text)):
        assert read([text[:at], text[at:]], name) == said, text[:at]
    return said


def whole(name: str) -> str:
    """A call of g that nothing is wrong with."""
    begin, parameter, end, ends = TAGGED[name]
    return begin.format("g") + parameter.format("a", "b") + end + "".join(ends)


def left_open() -> list[tuple[str, int]]:
    """Every format, with every number of its outer bounds left out from the inside."""
    return [
        (name, missing)
        for name, (_, _, _, ends) in TAGGED.items()
        for missing in range(len(ends) + 1)
    ]


@pytest.mark.parametrize(("name", "missing"), left_open())
def test_any_outer_bound_ends_a_value(name: str, missing: int) -> None:
    """The end of the call, of its region, or the next call or region: whichever comes."""
    begin, parameter, _, ends = TAGGED[name]
    broken = begin.format("f") + parameter.format("city", "Paris") + "\n" + "".join(ends[missing:])

    said = check(broken + "\n" + whole(name), name)

    assert [called for called, _ in said.meant] == ["f", "g"]
    assert said.meant[1:] == G
    assert said.meant[0][1]["city"].strip() == "Paris"
    assert not said.content.strip()


@pytest.mark.parametrize(("name", "missing"), left_open())
def test_an_outer_bound_ends_the_last_value_of_an_answer(name: str, missing: int) -> None:
    begin, parameter, _, ends = TAGGED[name]
    broken = begin.format("f") + parameter.format("city", "Paris") + "".join(ends[missing:])

    said = check(broken, name)

    assert [(called, each["city"]) for called, each in said.meant] == [("f", "Paris")]
    assert not said.content.strip()


@pytest.mark.parametrize("name", [*TAGGED, *SAME])
def test_the_next_parameter_ends_a_value(name: str) -> None:
    table = SAME.get(name, name)
    begin, parameter, end, ends = TAGGED[table]
    call = begin.format("f") + parameter.format("city", "Paris") + "\n"
    call += parameter.format("days", "3") + end + "".join(ends)

    said = check(call + "\n" + whole(table), name)

    assert said.meant[1:] == G
    assert {key: str(each).strip() for key, each in said.meant[0][1].items()} == {
        "city": "Paris",
        "days": "3",
    }


@pytest.mark.parametrize("name", ["glm45", "qwen3_xml"])
def test_a_name_that_is_left_open_is_no_parameter(name: str) -> None:
    begin, parameter, end, ends = TAGGED[name]
    opened = {"glm45": "<arg_key>days", "qwen3_xml": "<parameter=days\n"}[name]
    call = begin.format("f") + parameter.format("a", "x") + end + opened + "".join(ends)

    said = check(call + "\n" + whole(name), name)

    assert said.meant == [("f", {"a": "x"}), *G]


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_may_have_what_closes_a_call(name: str) -> None:
    """Documents in XML have elements of such names; the value's own end follows."""
    begin, parameter, end, ends = TAGGED[name]
    text = f"see {ends[0].strip()} and {ends[0].strip()}."
    call = begin.format("f") + parameter.format("text", text) + end + "".join(ends)

    said = check(call + "\n" + whole(name), name)

    assert said.meant == [("f", {"text": text}), *G]


JSON = {
    "hermes": ('<tool_call>\n{{"name": "{}", "arguments": {}', "}}", "\n</tool_call>"),
    "nemotron_json": ('<TOOLCALL>[{{"name": "{}", "arguments": {}', "}}]", "</TOOLCALL>"),
    "granite": ('<|tool_call|>[{{"name": "{}", "arguments": {}', "}}]", ""),
    "mistral_json": ('[TOOL_CALLS][{{"name": "{}", "arguments": {}', "}}]", ""),
    "mistral": ("[TOOL_CALLS]{}[ARGS]{}", "}", ""),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}",
        "}\n```",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}",
        "}",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}",
        "}",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "gemma4": ("<|tool_call>call:{}{}", "}", "<tool_call|>"),
    "functiongemma": ("<start_function_call>call:{}{}", "}", "<end_function_call>"),
}
"""A call up to its arguments, what ends it, and the marks behind it."""
QUOTES = {"gemma4": '<|"|>', "functiongemma": "<escape>"}


def arguments(name: str, value: str, *, closed: bool) -> str:
    quote = QUOTES.get(name, '"')
    key = "a" if name in QUOTES else '"a"'
    return "{" + key + ":" + quote + value + (quote if closed else "")


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("value", ["Paris", "Paris, of {all"])
def test_a_mark_ends_what_is_open_in_arguments(name: str, closed: bool, value: str) -> None:
    """A text, or the objects around it: they are closed, and the next call is read."""
    begin, end, marks = JSON[name]
    broken = begin.format("f", arguments(name, value, closed=closed)) + marks
    good = begin.format("g", arguments(name, "b", closed=True)) + end + marks

    said = check(broken + good, name)

    assert [(called, each["a"].strip()) for called, each in said.meant] == [
        ("f", value),
        ("g", "b"),
    ]
    assert not said.content.strip()


@pytest.mark.parametrize("name", [name for name, (_, _, marks) in JSON.items() if marks])
@pytest.mark.parametrize("closed", [False, True])
def test_a_mark_ends_what_is_open_at_an_answers_end(name: str, closed: bool) -> None:
    begin, _, marks = JSON[name]

    said = check(begin.format("f", arguments(name, "Paris", closed=closed)) + marks, name)

    assert [(called, each["a"].strip()) for called, each in said.meant] == [("f", "Paris")]
    assert not said.content.strip()


@pytest.mark.parametrize("name", sorted(set(JSON) - set(QUOTES)))
def test_a_text_in_arguments_may_have_marks(name: str) -> None:
    """JSON goes on behind the text: one writes of calls in a call."""
    begin, end, marks = JSON[name]
    value = f"a call ends with {marks or '[TOOL_CALLS]'}, and begins"
    call = begin.format("f", arguments(name, value, closed=True)) + end + marks
    good = begin.format("g", arguments(name, "b", closed=True)) + end + marks

    said = check(call + good, name)

    assert said.meant == [("f", {"a": value}), *G]


def test_a_call_that_the_answers_end_cuts_off_stays_cut_off() -> None:
    """Its client sees that it is not whole."""
    said = check('<tool_call>\n{"name": "f", "arguments": {"a": "Par', "hermes")

    assert [each[1:] for each in said.calls] == [["f", '{"a": "Par']]


def test_pythons_calls_are_read_behind_one_that_is_left_open() -> None:
    """The one that is none is content."""
    text = "<|python_start|>[f(a='x)]<|python_end|><|python_start|>[g(a='b')]<|python_end|>"

    said = check(text, "llama4_pythonic")

    assert said.meant == G


def test_harmonys_calls_end_at_its_marks() -> None:
    """A text that is left open swallows no later message."""
    text = (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": "Paris<|call|><|start|>assistant<|channel|>commentary to=functions.g '
        '<|constrain|>json<|message|>{"a": "b"}<|call|>'
    )

    said = check(text, "openai")

    assert said.meant == [("f", {"a": "Paris"}), *G]
