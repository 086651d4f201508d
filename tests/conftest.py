"""What tests of several rooms share: the embedded model, prepared once per cache."""

from pathlib import Path

import pytest

from tandem.hub import DEFAULT_MODEL, prepare


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The prepared folder of the embedded default: SmolLM2-135M-Instruct, weights in float32."""
    return prepare(DEFAULT_MODEL, progress=False).path
