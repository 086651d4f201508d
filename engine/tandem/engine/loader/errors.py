"""Error of a model's weights."""

from tandem.protocol.errors import TandemError


class LoadError(TandemError):
    """The weights cannot be used; the text names the tensor and the file."""
