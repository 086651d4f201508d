"""Parameters for programs: checked when they are made, with lists and dicts accepted.

They are subclasses of the engine's structs; ``wire`` converts them.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Self, TypeVar

import msgspec

from tandem.llm.other_servers import REFUSED, SAME, fate_of
from tandem.protocol import pooling, sampling, structured
from tandem.protocol.errors import InvalidParameter

_log = logging.getLogger(__name__)
DEFAULT_MAX_TOKENS = 16
"""Default of completions."""
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class UnknownOption(InvalidParameter, TypeError):
    """The option does not exist; the text names the nearest one."""

    def __init__(self, name: str, of: str, allowed: str) -> None:
        super().__init__(name, of, allowed)
        self.args = (f"{of} has no option {name!r}; {allowed}",)


def check_known(names: Iterable[str], known: Iterable[str], of: str) -> None:
    """Raise UnknownOption for the first unknown name."""
    options = sorted(known)
    for name in names:
        if name in options:
            continue
        near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
        allowed = f"the nearest is {near[0]!r}" if near else f"it has {', '.join(options)}"
        raise UnknownOption(name, of, allowed)


class _Named(msgspec.StructMeta):
    """Metaclass whose error for an unknown field names the nearest one."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        filled: tuple[str, ...] = getattr(cls, "_filled", ())
        known = [name for name in cls.__struct_fields__ if name not in filled]
        check_known(given, known, cls.__name__)
        return super().__call__(*args, **given)


class StructuredOutputsParams(
    structured.StructuredOutputsParams,
    metaclass=_Named,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
):
    """The form that an answer must match. ``json`` and ``structural_tag`` may be dicts, or text."""

    _filled = ("reasoning",)
    json: Any = None
    structural_tag: Any = None
    disable_additional_properties: bool = False
    """Allowed with JSON only: objects have no properties except those that the schema names."""

    def __post_init__(self) -> None:
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if name == "json" and self.disable_additional_properties and value is not None:
                value = _closed(_parsed(value))
            if value is not None and not isinstance(value, str):
                _set(self, name, _text(name, value))
        if self.choice is not None and not isinstance(self.choice, list):
            _set(self, "choice", list(self.choice))
        _checked(self, structured.StructuredOutputsParams, "structured_outputs").verify()


class SamplingParams(
    sampling.SamplingParams, metaclass=_Named, frozen=True, kw_only=True, omit_defaults=True
):
    """Rules for sampling tokens and for stopping. Raises InvalidParameter when it is made."""

    _filled = ("bad_words_token_ids", "thinking")
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    """Maximum tokens to emit; None is the rest of the context."""
    stop: Any = ()
    """A text that ends the output, or several."""
    stop_token_ids: Any = ()
    """Token ids that end the output."""
    bad_words: Any = ()
    """Texts never to emit."""
    allowed_token_ids: Any = None
    """Only these tokens may be sampled."""
    structured_outputs: Any = None
    """Form that the answer must match: StructuredOutputsParams, or a dict of its fields."""

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            if value is None or isinstance(value, str):
                _set(self, name, () if value is None else (value,))
        for name in ("stop_token_ids", "allowed_token_ids"):
            if isinstance(value := getattr(self, name), list | range | set):
                _set(self, name, tuple(value))
            elif value is None and name == "stop_token_ids":
                _set(self, name, ())
        if isinstance(self.structured_outputs, Mapping):
            _set(self, "structured_outputs", StructuredOutputsParams(**self.structured_outputs))
        wire(self)

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Make parameters of those of ``given`` that are not None."""
        return cls(**{name: value for name, value in given.items() if value is not None})


class PoolingParams(
    pooling.PoolingParams, metaclass=_Named, frozen=True, kw_only=True, omit_defaults=True
):
    """The task for a prompt's hidden states. Raises InvalidParameter when it is made."""

    _filled = ()

    def __post_init__(self) -> None:
        _checked(self, pooling.PoolingParams, "").verify()


def wire(given: SamplingParams) -> sampling.SamplingParams:
    """Return the verified parameters of the engine."""
    form = given.structured_outputs
    if isinstance(form, StructuredOutputsParams):
        form = _checked(form, structured.StructuredOutputsParams, "structured_outputs")
    fields = {**msgspec.structs.asdict(given), "structured_outputs": form}
    return _converted(fields, sampling.SamplingParams, "").verify()


def _checked(given: msgspec.Struct, kind: type[_Struct], param: str) -> _Struct:
    """Return the fields of ``given`` that ``kind`` has, as one of these."""
    fields = {name: getattr(given, name) for name in kind.__struct_fields__}
    return _converted(fields, kind, param)


def _converted(fields: dict[str, Any], kind: type[_Struct], param: str) -> _Struct:
    """Return ``fields`` as ``kind``. Raises InvalidParameter that names the field."""
    types = {each.name: each.type for each in msgspec.structs.fields(kind)}
    converted: dict[str, Any] = {}
    for name, value in fields.items():
        try:
            converted[name] = msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            path = f"{param}.{name}" if param else name
            raise InvalidParameter(path, value, str(error)) from None
    return kind(**converted)


def _set(struct: msgspec.Struct, name: str, value: Any) -> None:
    msgspec.structs.force_setattr(struct, name, value)


def _text(name: str, value: Any) -> str:
    if hasattr(value, "model_json_schema"):  # a class of pydantic
        value = value.model_json_schema()
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        allowed = f"a dict of JSON values, or text ({error})"
        raise InvalidParameter(f"structured_outputs.{name}", value, allowed) from None


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return json.loads(_text("json", value))
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value  # ``verify`` reports it


def _closed(schema: Any) -> Any:
    """Return ``schema`` without additional properties."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def known_options(given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return the options of an ``LLM`` by Tandem's names, with warnings for those without effect.

    Raises UnknownOption or InvalidParameter.
    """
    names, found = set(known), dict[str, Any]()
    for name, value in given.items():
        if name in names:
            found[name] = value
        elif (why := fate_of(name, value)) is not None:
            if value not in (None, False):
                _log.warning("LLM(%s=...) has no effect: %s", name, why)
        elif name in REFUSED:
            raise InvalidParameter(name, value, f"none: {REFUSED[name]}")
        elif (ours := SAME.get(name)) in names:
            found[str(ours)] = value
        else:
            check_known([name], [*names, *_OF_LLM], "LLM")
    served = found.get("served_model_name")
    if isinstance(served, list | tuple) and served:
        found["served_model_name"] = served[0]
    return found


def json_text(given: Mapping[str, Any] | str | None) -> str:
    """Return a JSON object as text, or ""."""
    return given if isinstance(given, str) else json.dumps(given) if given else ""


_OF_LLM = (
    "chat_template",
    "generation_config",
    "hf_overrides",
    "log_stats_interval",
    "override_generation_config",
    "stat_loggers",
    "tokenizer",
)
