"""What a format is: tables that the engine reads."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.text.parsers.bodies import Body


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterText:
    """How one parameter of a call stands in a text."""

    begin: str
    """From its first mark to its value, with ``{key}`` for its name."""
    key_end: str
    """Ends the name."""
    pad: str = ""
    """May stand between the value and its end, and belongs to neither."""
    end: str
    """Ends the value."""
    after: str = ""
    """Stands before the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralText:
    """The syntax of arguments that are literals of another syntax than JSON."""

    key: str
    """Before an argument's value, with ``{key}`` for its name."""
    inner_key: str
    """The same within an object."""
    separator: str
    """Stands between arguments, and between items."""
    quote: str = ""
    """Stands around texts, which are written as they are; empty where they are written as in
    JSON."""
    words: tuple[str, str, str]
    """True, false and null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """How a call stands in a text, its arguments in the middle: what a grammar may hold a model
    to."""

    trigger: str
    """Begins a region of calls."""
    begin: str
    """From the trigger to the arguments, with ``{name}`` for the tool's name."""
    head: tuple[str, ...] = ()
    """Stand between ``begin`` and the arguments, where what begins like a call may be JSON of
    another kind: grammars read each by itself."""
    after_number: str = ""
    """Where set, the call's number stands behind ``begin``, and this between it and the
    arguments."""
    parameters: ParameterText | None = None
    """How arguments are written one by one; None: they are one object in JSON."""
    literals: LiteralText | None = None
    """How arguments are written in another syntax than JSON."""
    end: str
    """From the arguments to the end of the region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartText:
    """The syntax of calls that begin an answer, with or without a mark."""

    open: str = ""
    """Before the first call."""
    separator: str
    """Between two calls."""
    close: str = ""
    """After the last call."""
    marks: tuple[tuple[str, str], ...]
    """Texts that may begin a region of calls, each with what ends it then."""
    words: tuple[tuple[str, str], ...]
    """What begins an answer that has no call: texts, each with an expression of what follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes calls: regions, each with one call or several."""

    opens: tuple[str, ...]
    """Texts that begin a region."""
    body: Body
    """What stands in a call."""
    call_opens: tuple[str, ...] = ()
    """Begin a call within a region; one of them may begin a region, too."""
    call_close: str = ""
    """May end a call."""
    separators: tuple[str, ...] = ()
    """Stand between calls of a region, where nothing else tells them apart."""
    listed: bool = False
    """Calls may stand in a list, between [ and ], with commas."""
    needs_list: bool = False
    """They always do."""
    closes: tuple[str, ...] = ()
    """May end a region."""
    at_start: tuple[str, ...] = ()
    """Texts that begin a region only where the model has said nothing yet; they are read again as
    the region's own."""

    texts: tuple[CallText, ...] = ()
    """One for each mark that begins a region; one alone where calls may begin without a mark."""
    start: StartText | None = None
    """Where calls may begin an answer without a mark."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that it is told by: special tokens among them must be seen."""
        own = (*self.opens, *self.call_opens, self.call_close, *self.closes)
        return tuple(each for each in (*own, *self.body.marks) if each)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a model marks what it thinks."""

    opens: tuple[str, ...]
    close: str
    starts_open: bool = False
    """An answer begins within reasoning, unless the prompt has closed it."""
    answered: tuple[str, ...] = ()
    """An answer to a prompt that ends with one of these (a tool's result) does not, though."""

    @property
    def marks(self) -> tuple[str, ...]:
        """See ``ToolFormat.marks``."""
        return (*self.opens, self.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFormat:
    """Messages with headers that name a channel and who they are for (Harmony)."""

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
    """How calls stand: who they are for is named before or after the channel."""
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")

    @property
    def marks(self) -> tuple[str, ...]:
        """See ``ToolFormat.marks``."""
        return (self.start, self.channel, self.message, self.constrain, *self.ends)
