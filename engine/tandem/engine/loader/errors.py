"""Errors of a model's weights; each text names the tensor and the file."""

from tandem.protocol.errors import TandemError


class LoadError(TandemError):
    """Base of the loader's errors."""


class WeightsNotFound(LoadError):
    """The folder has no weight files, or lacks one that its index names."""


class BadWeightsFile(LoadError):
    """A weight file or index is invalid, or two files have the same tensor."""


class MissingTensor(LoadError):
    """The files lack a tensor that the model needs."""


class UnexpectedTensors(LoadError):
    """The files hold tensors that the model does not use."""


class WrongShape(LoadError):
    """The tensor's shape differs from the one that follows from config.json."""


class UnsupportedTensor(LoadError):
    """The tensor's type cannot be cast to the model's, such as packed integers."""
