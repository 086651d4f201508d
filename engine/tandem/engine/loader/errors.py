"""Errors of a model's weights.

    LoadError
    ├── WeightsNotFound      the folder has no weight files, or lacks one that its index names
    ├── BadWeightsFile       a file that cannot be read, or two that claim one tensor
    ├── MissingTensor        the model needs a tensor that no file holds
    ├── UnexpectedTensors    files hold tensors that the model does not know
    ├── WrongShape           a tensor is there in another shape than the model has
    └── UnsupportedTensor    a tensor whose type this engine does not read as weights

Every text names the tensor and the file, so that it can be acted on without a debugger.
"""

from tandem.protocol.errors import TandemError


class LoadError(TandemError):
    """Anything that the loader raises on purpose."""


class WeightsNotFound(LoadError):
    """No weight files, or one of them is not there."""


class BadWeightsFile(LoadError):
    """A weight file or its index cannot be understood."""


class MissingTensor(LoadError):
    """The files lack a tensor that the model needs."""


class UnexpectedTensors(LoadError):
    """The files hold tensors without a use: another architecture, or a lost feature."""


class WrongShape(LoadError):
    """The tensor's shape differs from the one that follows from config.json."""


class UnsupportedTensor(LoadError):
    """The tensor's type cannot be cast to the model's, for instance packed integers."""
