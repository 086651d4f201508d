"""Settings of structured output."""

from dataclasses import dataclass
from importlib.util import find_spec

from tandem.base.settings import check_choices, setting
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.structured import BACKENDS

_PACKAGES = dict(
    zip(BACKENDS, ("llguidance", "outlines_core", "xgrammar", "lmformatenforcer"), strict=True)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """Structured output of one engine."""

    structured_outputs_backend: str = setting(
        "guidance",
        "Library for structured output, unless a request names another one. All but guidance "
        "require tandem-serving[grammars].",
        choices=BACKENDS,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        backend = self.structured_outputs_backend
        # Images that only check settings have no engine; every engine has guidance.
        if backend != "guidance" and (missing := missing_package(backend)):
            raise InvalidParameter("structured_outputs_backend", backend, f"guidance: {missing}")


def missing_package(backend: str) -> str | None:
    """Return what to install for a backend, or None if its package is present."""
    package = _PACKAGES[backend]
    if find_spec(package) is not None:
        return None
    return f"the package {package!r} is not installed; install tandem-serving[grammars]"
