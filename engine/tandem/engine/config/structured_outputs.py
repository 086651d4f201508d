"""Settings of the compiler of structured output."""

from dataclasses import dataclass
from importlib.util import find_spec

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.settings import check_choices, setting

BACKENDS = ("auto", "guidance", "outlines")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """Structured output of one engine."""

    structured_outputs_backend: str = setting(
        "auto",
        "What compiles the grammars of structured output: guidance; outlines (choices, regular "
        "expressions and schemas; its package is the extra tandem-serving[outlines]); or auto, "
        "guidance with outlines for what guidance refuses, where it is installed.",
        choices=BACKENDS,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.structured_outputs_backend == "outlines" and find_spec("outlines_core") is None:
            allowed = (
                "auto or guidance where outlines-core is not; install tandem-serving[outlines]"
            )
            raise InvalidParameter("structured_outputs_backend", "outlines", allowed)
