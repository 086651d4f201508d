"""Texts as models write them, made from what they mean, in every format."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]
Write = Callable[[str, Sequence[Call]], str]


def _json(key: str = "arguments") -> Callable[[Call], str]:
    return lambda call: json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _each(form: str, one: Callable[[Call], str]) -> Write:
    return lambda text, calls: text + "\n".join(form % one(call) for call in calls)


def _listed(form: str) -> Write:
    return lambda text, calls: text + form % ", ".join(map(_json(), calls))


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _xml(call: Call) -> str:
    inner = "".join(
        f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in call[1].items()
    )
    return f"<function={call[0]}>\n{inner}</function>"


def _glm(call: Call) -> str:
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
        for key, value in call[1].items()
    )
    return f"{call[0]}\n{inner}"


def _invoke(call: Call) -> str:
    inner = "".join(
        f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in call[1].items()
    )
    return f'<invoke name="{call[0]}">\n{inner}</invoke>'


def _python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def _gemma(quote: str) -> Callable[[Call], str]:
    def value(each: object) -> str:
        if isinstance(each, str):
            return quote + each + quote
        if isinstance(each, dict):
            return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in each.items()) + "}"
        if isinstance(each, list):
            return "[" + ",".join(map(value, each)) + "]"
        return json.dumps(each)

    return lambda call: f"call:{call[0]}{value(call[1])}"


def _parts(form: str, section: str = "%s") -> Write:
    def write(text: str, calls: Sequence[Call]) -> str:
        inner = "".join(
            form % {"name": name, "args": json.dumps(args, ensure_ascii=False), "number": number}
            for number, (name, args) in enumerate(calls)
        )
        return text + (section % inner if calls else "")

    return write


def _harmony(text: str, calls: Sequence[Call]) -> str:
    said = [f"<|channel|>final<|message|>{text}"] if text else []
    for name, args in calls:
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        said.append(header + json.dumps(args, ensure_ascii=False))
    return "<|call|><|start|>assistant".join(said)


def _without_text(write: Write) -> Write:
    return lambda text, calls: write("" if calls else text, calls)


_DEEPSEEK = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"
WRITERS: dict[str, Write] = {
    "hermes": _each("<tool_call>\n%s\n</tool_call>", _json()),
    "qwen3_xml": _each("<tool_call>\n%s\n</tool_call>", _xml),
    "qwen3_coder": _each("%s", _xml),
    "seed_oss": _each("<seed:tool_call>\n%s\n</seed:tool_call>", _xml),
    "granite": lambda text, calls: _listed("<|tool_call|>[%s]")(text, calls) if calls else text,
    "glm45": _each("<tool_call>%s</tool_call>", _glm),
    "minimax_m2": lambda text, calls: (
        text + f"<minimax:tool_call>\n{chr(10).join(map(_invoke, calls))}\n</minimax:tool_call>"
        if calls
        else text
    ),
    "llama3_json": _without_text(
        lambda text, calls: text + "; ".join(map(_json("parameters"), calls))
    ),
    "pythonic": _without_text(
        lambda text, calls: f"[{', '.join(map(_python, calls))}]" if calls else text
    ),
    "mistral": _parts("[TOOL_CALLS]%(name)s[ARGS]%(args)s"),
    "mistral_json": lambda text, calls: _listed("[TOOL_CALLS][%s]")(text, calls) if calls else text,
    "nemotron_json": lambda text, calls: (
        _listed("<TOOLCALL>[%s]</TOOLCALL>")(text, calls) if calls else text
    ),
    "deepseek_v3": _parts(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%(name)s\n```json\n%(args)s\n```"
        "<｜tool▁call▁end｜>\n",
        _DEEPSEEK,
    ),
    "deepseek_v31": _parts(
        "<｜tool▁call▁begin｜>%(name)s<｜tool▁sep｜>%(args)s<｜tool▁call▁end｜>", _DEEPSEEK
    ),
    "kimi_k2": _parts(
        "<|tool_call_begin|>functions.%(name)s:%(number)d<|tool_call_argument_begin|>%(args)s"
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>%s<|tool_calls_section_end|>",
    ),
    "gemma4": _each("<|tool_call>%s<tool_call|>", _gemma('<|"|>')),
    "functiongemma": _each("<start_function_call>%s<end_function_call>", _gemma("<escape>")),
    "openai": _harmony,
}
THOUGHTS = {
    "qwen3": "<think>\n%s</think>\n\n",
    "seed_oss": "<seed:think>%s</seed:think>",
    "deepseek_r1": "%s</think>",
    "glm45": "<think>%s</think>",
    "minimax_m2": "<think>%s</think>",
    "mistral": "[THINK]%s[/THINK]",
    "gemma4": "<|channel>thought\n%s<channel|>",
    "kimi_k2": "<think>%s</think>",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "share": {"type": "number"},
                    "sure": {"type": "boolean"},
                    "many": {"type": "array"},
                    "deep": {"type": "object"},
                },
            },
        },
    }
    for name in ("get_weather", "f", "a.b-c")
]
_TEXTS = (
    "Paris",
    "naïve 日本 😀",
    "a < b > c",
    "<tool",
    "it's [1]",
    "x=(1)",
    "</para",
    "[TOOL",
    "}{",
)
_VALUES: dict[str, Sequence[object]] = {
    "text": _TEXTS,
    "count": (0, -7, 12345678901234567890),
    "share": (0.5, -1e-09),
    "sure": (True, False),
    "many": ([], [1, "two", [3]]),
    "deep": ({}, {"a": {"b": [1, {"c": "d"}]}}),
}


def meanings(seed: int, count: int, *, tail_names: Sequence[str]) -> list[tuple[str, list[Call]]]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        text = draw.choice(("", "Well. ", "1 < 2, see <b>this</b>: ", "日本 <|x|> "))
        calls = [
            (
                draw.choice(tail_names),
                {
                    key: draw.choice(_VALUES[key])
                    for key in draw.sample(sorted(_VALUES), draw.randrange(4))
                },
            )
            for _ in range(draw.randrange(4))
        ]
        found.append((text, calls))
    return found
