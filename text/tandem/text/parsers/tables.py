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
class CallText:
    """How a call stands in a text, its arguments in the middle: what a grammar may hold a model
    to."""

    trigger: str
    """Begins a region of calls."""
    begin: str
    """From the trigger to the arguments, with ``{name}`` for the tool's name."""
    after_number: str = ""
    """Where set, the call's number stands behind ``begin``, and this between it and the
    arguments."""
    parameters: ParameterText | None = None
    """How arguments are written one by one; None: they are one object in JSON."""
    end: str
    """From the arguments to the end of the region."""


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
    """One for each mark that begins a region; none where calls may begin without a mark, or
    arguments are neither JSON nor parameters between tags."""

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
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")

    @property
    def marks(self) -> tuple[str, ...]:
        """See ``ToolFormat.marks``."""
        return (self.start, self.channel, self.message, self.constrain, *self.ends)
