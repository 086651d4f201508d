"""Formats as tables that the engine reads."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.text.parsers.bodies import Body


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterText:
    """Syntax of one parameter of a call."""

    begin: str
    """Text before its value, with ``{key}`` for its name."""
    key_end: str
    pad: str = ""
    """Optional text between the value and its end."""
    end: str
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralText:
    """Syntax of arguments in literals other than JSON."""

    key: str
    """Text before an argument's value, with ``{key}`` for its name."""
    inner_key: str
    """Text before a value within an object, with ``{key}`` for its name."""
    separator: str
    """Text between arguments or items."""
    quote: str = ""
    """Text around strings, which are not escaped. Empty if strings are JSON."""
    words: tuple[str, str, str]
    """Words for true, false and null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """Syntax of a call around its arguments, for a grammar."""

    trigger: str
    begin: str
    """Text from the trigger to the arguments, with ``{name}`` for the tool's name."""
    head: tuple[str, ...] = ()
    """Texts between ``begin`` and the arguments, if other JSON may begin like a call."""
    after_number: str = ""
    """Text between the call's number, which follows ``begin``, and the arguments."""
    parameters: ParameterText | None = None
    """Syntax of separate arguments; None: they are one JSON object."""
    literals: LiteralText | None = None
    """Syntax of arguments that are not JSON."""
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartText:
    """Syntax of calls at the start of an answer, with or without a mark."""

    open: str = ""
    separator: str
    close: str = ""
    marks: tuple[tuple[str, str], ...]
    """Texts that begin a region of calls, each with the text that ends it."""
    words: tuple[tuple[str, str], ...]
    """Texts that begin an answer without a call, each with an expression of what follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Syntax of a model's calls: regions of one or several calls."""

    opens: tuple[str, ...]
    body: Body
    call_opens: tuple[str, ...] = ()
    """Texts that begin a call within a region, and possibly the region."""
    call_close: str = ""
    separators: tuple[str, ...] = ()
    """Texts between calls of a region."""
    listed: bool = False
    """Whether calls may be a list in brackets."""
    needs_list: bool = False
    closes: tuple[str, ...] = ()
    at_start: tuple[str, ...] = ()
    """Texts that begin a region only at the start of the answer, and are part of it."""

    texts: tuple[CallText, ...] = ()
    """One for each mark that begins a region; only one if calls may have no mark."""
    start: StartText | None = None
    """Syntax of calls that begin an answer without a mark, if allowed."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return texts that may be special tokens and must be kept."""
        own = (*self.opens, *self.call_opens, self.call_close, *self.closes)
        return tuple(each for each in (*own, *self.body.marks) if each)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Marks of a model's reasoning."""

    opens: tuple[str, ...]
    close: str
    starts_open: bool = False
    """Whether an answer begins within reasoning, unless the prompt has closed it."""
    answered: tuple[str, ...] = ()
    """Ends of a prompt after which an answer does not begin within reasoning."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.opens, self.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFormat:
    """Messages with headers that name a channel and a recipient (Harmony)."""

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    constrain: str = "<|constrain|>"
    end: str = "<|end|>"
    texts: tuple[CallText, ...] = (
        CallText(
            trigger="",
            begin="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            end="",
        ),
        CallText(
            trigger="",
            begin=" to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
            end="",
        ),
    )
    """Syntax of calls: the recipient is before or after the channel."""
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.start, self.channel, self.message, self.constrain, *self.ends)
