"""Any model source → a prepared folder, before any process starts.

Composes the other modules and decides nothing that they could. ``tandem up`` and ``tandem serve``
call it, and so does the init container of a pod. What it needs for GGUF and for the hub is imported
when such a source is named: a folder needs neither.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tandem.hub import folder
from tandem.hub.cache import build_once, cache_root
from tandem.hub.digest import sampled_digest
from tandem.hub.errors import UnsupportedModel
from tandem.hub.gguf import VERSION
from tandem.hub.gguf.head import head_bytes
from tandem.hub.package import gguf_in
from tandem.hub.source import Folder, GgufFile, HubRepo, Package, parse


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A folder that a worker or a router can start from."""

    path: Path
    """Holds config.json and, unless prepared without weights, tokenizer.json and safetensors."""
    source: str
    """What the user wrote."""
    revision: str | None
    """Commit of a hub source; None where the source has none."""
    fingerprint: str
    """32 hex digits of config and weights: equal where the same KV can be used."""


def prepare(
    source: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: bool = True,
    weights: bool = True,
) -> PreparedModel:
    """The folder for ``source``, converted or fetched if need be.

    ``weights=False`` prepares what describes the model only: enough for a router (where the source
    has a tokenizer) and for a worker with dummy weights. A GGUF file is converted once and kept
    under ``cache_dir``. ``progress`` draws a bar on a terminal. Raises a HubError.
    """
    where, commit = _locate(source, revision=revision, weights=weights)
    if where.is_file():
        where = _converted(where, cache_root(cache_dir), progress=progress, weights=weights)
    folder.check(where, weights=weights)
    return PreparedModel(
        path=where,
        source=source,
        revision=commit,
        fingerprint=folder.fingerprint(where, weights=weights),
    )


def _locate(source: str, *, revision: str | None, weights: bool) -> tuple[Path, str | None]:
    found = parse(source)
    if revision is not None and not isinstance(found, HubRepo):
        raise UnsupportedModel(
            f"revision: {revision!r} was given with {source!r}; only a hub id has revisions"
        )
    match found:
        case Folder(path) | GgufFile(path):
            return path, None
        case Package(name):
            return gguf_in(name), None
        case HubRepo(repo_id, file):
            from tandem.hub import fetch

            if file is not None:
                return fetch.fetch_file(repo_id, file, revision=revision)
            return fetch.fetch_folder(repo_id, revision=revision, weights=weights)


def _converted(path: Path, root: Path, *, progress: bool, weights: bool) -> Path:
    name = re.sub(r"[^\w.-]+", "-", path.stem)
    kind = "" if weights else "-described"
    digest = sampled_digest(path, head_bytes(path)).hex()[:16]
    entry = root / "models" / f"{name}-{digest}-v{VERSION}{kind}"

    def build(folder: Path) -> None:
        from tandem.hub.gguf.convert import convert

        convert(path, folder, progress=progress, weights=weights)

    return build_once(entry, build)
