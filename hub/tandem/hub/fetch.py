"""Fetching of a repository's files into huggingface_hub's own cache.

Only required files are fetched. Endpoint, token and cache follow huggingface_hub's variables.
"""

from collections.abc import Callable
from glob import escape
from pathlib import Path
from typing import TypeVar

import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    get_session,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from tandem.hub import folder
from tandem.hub.errors import AccessDenied, HubError, ModelNotFound, Offline

_DESCRIPTION = ["*.json", "*.jinja", "tokenizer.model"]
_BELOW = "*/*"
_FETCH = TypeVar("_FETCH")


def fetch_folder(
    repo_id: str, *, revision: str | None, weights: bool, check: Callable[[Path], None]
) -> tuple[Path, str]:
    """Return the local folder and commit of a repository.

    Without ``weights`` only the description is fetched. ``check`` gets the folder with the
    description, before any weights. Raises what it raises, Offline, ModelNotFound, AccessDenied or
    UnsupportedModel.
    """

    def fetched(at: str | None, wanted: list[str], unwanted: str | None = None) -> Path:
        path = _explained(
            repo_id,
            revision,
            lambda: snapshot_download(
                repo_id, revision=at, allow_patterns=wanted, ignore_patterns=unwanted
            ),
        )
        return Path(path)

    path = fetched(revision, _DESCRIPTION)
    commit = path.name
    if not (path / "config.json").is_file():
        folder.explain_no_config(repo_id, _names(repo_id, commit))
    check(path)
    if weights:
        named = folder.indexed_files(path)
        fetched(commit, [folder.SINGLE] if named is None else [escape(name) for name in named])
        if named is None and not (path / folder.SINGLE).is_file():
            fetched(commit, ["*.safetensors"], _BELOW)
            if not any(path.glob("*.safetensors")):
                folder.explain_no_weights(repo_id, _names(repo_id, commit))
    return path, commit


def _names(repo_id: str, commit: str) -> list[str]:
    try:
        return list(HfApi().list_repo_files(repo_id, revision=commit))
    except (OSError, OfflineModeIsEnabled, httpx2.HTTPError):
        return []


def fetch_start(repo_id: str, file: str, *, revision: str | None, size: int) -> bytes:
    """Return the first ``size`` bytes of a file; empty if the hub does not send them."""
    known = try_to_load_from_cache(repo_id, file, revision=revision)
    if isinstance(known, str):
        with Path(known).open("rb") as local:
            return local.read(size)
    url = hf_hub_url(repo_id, file, revision=revision)
    headers = {**build_hf_headers(), "Range": f"bytes=0-{size - 1}"}
    start = b""
    try:
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
            if answer.status_code not in (200, 206):
                return b""
            for piece in answer.iter_raw():
                start += piece
                if len(start) >= size:
                    break
    except (OSError, OfflineModeIsEnabled, httpx2.HTTPError):
        return b""
    return start[:size]


def fetch_file(repo_id: str, file: str, *, revision: str | None) -> tuple[Path, str]:
    """Return the local path and commit of one file. Raises the errors of ``fetch_folder``."""
    path = _explained(
        repo_id, revision, lambda: hf_hub_download(repo_id, filename=file, revision=revision)
    )
    commit = Path(path).relative_to(_snapshots(Path(path))).parts[0]
    return Path(path), commit


def _snapshots(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name == "snapshots")


def _explained(repo_id: str, revision: str | None, fetch: Callable[[], _FETCH]) -> _FETCH:
    at = f"{repo_id}@{revision}" if revision else repo_id
    try:
        return fetch()
    except GatedRepoError as error:
        raise AccessDenied(
            f"model: {at} is gated; accept its terms on {constants.ENDPOINT} and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"model: no repository {repo_id!r} on {constants.ENDPOINT} that this token may see"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFound(f"model: {repo_id} has no revision {revision!r}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx2.TransportError) as error:
        raise Offline(_offline_text(at)) from error
    except EntryNotFoundError as error:
        raise ModelNotFound(f"model: {at} does not have that file: {error}") from error
    except HfHubHTTPError as error:
        raise HubError(f"model: {at} was not fetched from {constants.ENDPOINT}: {error}") from error


def _offline_text(at: str) -> str:
    return (
        f"model: {at} is not in {constants.HF_HUB_CACHE} and {constants.ENDPOINT} does not answer. "
        f"Download it where there is a network (`hf download {at.partition('@')[0]} --local-dir "
        f"FOLDER`) and give the folder, or point HF_HOME at a cache that has it, or HF_ENDPOINT at "
        f"a mirror"
    )
