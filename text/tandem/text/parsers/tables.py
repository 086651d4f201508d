"""Formats as tables that the engine reads."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.text.parsers.bodies import Body


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterText:
    """Syntax of one parameter of a call."""

    begin: str
    """Text from its first mark to its value, with ``{key}`` for its name."""
    key_end: str
    """Text that ends the name."""
    pad: str = ""
    """Optional text between the value and its end, which belongs to neither."""
    end: str
    """Text that ends the value."""
    after: str = ""
    """Text before the next parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralText:
    """Syntax of arguments that are literals of another syntax than JSON."""

    key: str
    """Text before an argument's value, with ``{key}`` for its name."""
    inner_key: str
    """Text before a value within an object, with ``{key}`` for its name."""
    separator: str
    """Text between arguments, and between items."""
    quote: str = ""
    """Text around strings, which are written unescaped. Empty if they are written as in JSON."""
    words: tuple[str, str, str]
    """Words for true, false and null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """Syntax of a call around its arguments, to which a grammar may restrict a model."""

    trigger: str
    """Text that begins a region of calls."""
    begin: str
    """Text from the trigger to the arguments, with ``{name}`` for the tool's name."""
    head: tuple[str, ...] = ()
    """Texts between ``begin`` and the arguments, if JSON of another kind may begin like a call.
    Grammars read each separately."""
    after_number: str = ""
    """Text between the call's number and the arguments. If set, the number follows ``begin``."""
    parameters: ParameterText | None = None
    """Syntax of arguments written one by one; None: they are one JSON object."""
    literals: LiteralText | None = None
    """Syntax of arguments written in another syntax than JSON."""
    end: str
    """Text from the arguments to the end of the region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartText:
    """Syntax of calls that begin an answer, with or without a mark."""

    open: str = ""
    """Text before the first call."""
    separator: str
    """Text between two calls."""
    close: str = ""
    """Text after the last call."""
    marks: tuple[tuple[str, str], ...]
    """Texts that may begin a region of calls, each with the text that ends it then."""
    words: tuple[tuple[str, str], ...]
    """Texts that begin an answer without a call, each with an expression of what follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Syntax of a model's calls: regions, each with one call or several."""

    opens: tuple[str, ...]
    """Texts that begin a region."""
    body: Body
    """Syntax of a call."""
    call_opens: tuple[str, ...] = ()
    """Texts that begin a call within a region; one of them may begin a region, too."""
    call_close: str = ""
    """Optional text that ends a call."""
    separators: tuple[str, ...] = ()
    """Texts between calls of a region, if no other text separates them."""
    listed: bool = False
    """True if calls may be in a list, between [ and ], with commas."""
    needs_list: bool = False
    """True if they are always in a list."""
    closes: tuple[str, ...] = ()
    """Optional texts that end a region."""
    at_start: tuple[str, ...] = ()
    """Texts that begin a region only at the start of the answer, and are part of it."""

    texts: tuple[CallText, ...] = ()
    """One for each mark that begins a region; only one if calls may begin without a mark."""
    start: StartText | None = None
    """Syntax of calls that begin an answer without a mark, if the format allows them."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all texts that identify the format; special tokens among them must be kept."""
        own = (*self.opens, *self.call_opens, self.call_close, *self.closes)
        return tuple(each for each in (*own, *self.body.marks) if each)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Marks of a model's reasoning."""

    opens: tuple[str, ...]
    close: str
    starts_open: bool = False
    """True if an answer begins within reasoning, unless the prompt has closed it."""
    answered: tuple[str, ...] = ()
    """Ends of a prompt (a tool's result) after which an answer does not begin within reasoning."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks as ``ToolFormat.marks``."""
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
    """Syntax of calls: the recipient is named before or after the channel."""
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks as ``ToolFormat.marks``."""
        return (self.start, self.channel, self.message, self.constrain, *self.ends)
