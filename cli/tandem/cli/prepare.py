"""`tandem prepare`: reads or fetches a model, and reports its facts as one line of JSON."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.base.settings import required, setting
from tandem.cli.settings.command import parse
from tandem.cli.settings.flags import Section
from tandem.cli.settings.logs import set_up_logging
from tandem.protocol import names
from tandem.protocol.errors import InvalidParameter, TandemError

if TYPE_CHECKING:
    from tandem.hub import PreparedModel

_SCRATCH = ".fetching"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Model to prepare, and output paths."""

    model: str = required("A folder, a GGUF file, a hub id or package:NAME.")
    to: str = setting(
        "",
        "Folder to fill, completely or not at all. Default: read --model in place, or from "
        "the cache.",
    )
    source_revision: str | None = setting(
        None, "Branch, tag or commit of a hub id; required version of a package."
    )
    report: str = setting("", "File for the report. Default: standard output.")


def run(argv: list[str]) -> int:
    """Return 0 if the report is ok, 1 after a temporary failure, else EXIT_MODEL_REFUSED."""
    given = parse("prepare", __doc__.splitlines()[0], [Section("Prepare", PrepareConfig)], argv)
    if "model" not in given[PrepareConfig]:
        raise InvalidParameter("--model", None, "a folder, a GGUF file, a hub id or package:NAME")
    config = PrepareConfig(**given[PrepareConfig])
    set_up_logging("info")
    try:
        report = {"ok": True, **(fetched(config) if config.to else described(config))}
    except (TandemError, OSError) as error:
        report = {"ok": False, "reason": reason_of(error), "message": str(error)[:2000]}
    text = json.dumps(report) + "\n"
    if config.report:
        Path(config.report).write_text(text)
    print(text, end="")
    if report["ok"]:
        return 0
    return 1 if report["reason"] == "FetchFailed" else names.EXIT_MODEL_REFUSED


def described(config: PrepareConfig) -> dict[str, Any]:
    """Return facts about the model. Other sources than folders are prepared first."""
    from tandem.hub import prepare

    revision = _revision(config)
    prepared = prepare(config.model, revision=revision, progress=False, check=_check_servable)
    return {**_facts(prepared), "path": str(prepared.path), "revision": prepared.revision}


def _facts(prepared: PreparedModel) -> dict[str, Any]:
    from tandem.engine.config import read_facts

    facts = read_facts(prepared.path)
    files = [file for file in prepared.path.rglob("*") if file.is_file()]
    return {
        "fingerprint": prepared.fingerprint,
        "bytes": sum(file.stat().st_size for file in files),
        "architecture": facts.architecture,
        "numHeads": facts.num_heads,
        "numKvHeads": facts.num_kv_heads,
        "maxModelLen": facts.derived_max_len,
    }


def fetched(config: PrepareConfig) -> dict[str, Any]:
    """Return the report on ``--to``, filled unless another run has."""
    target = Path(config.to)
    note = target / ".tandem-revision"
    if not target.is_dir():
        _fetch(config, target, note.name)
    from tandem.hub import prepare

    _check_servable(target)
    revision = note.read_text().strip() or None if note.is_file() else None
    return {**_facts(prepare(str(target), progress=False)), "revision": revision}


def _fetch(config: PrepareConfig, target: Path, note: str) -> None:
    """Fill the folder once, while jobs of other services wait. Raises CacheBusy."""
    scratch = target.parent / f"{_SCRATCH}-{target.name}"
    os.environ["HF_HOME"] = str(scratch / "hub")  # before huggingface_hub is imported
    from tandem.hub import prepare
    from tandem.hub.cache import build_once
    from tandem.operator.desired.model import JOB_DEADLINE

    revision = _revision(config)

    def build(folder: Path) -> None:
        prepared = prepare(
            config.model,
            revision=revision,
            cache_dir=scratch,
            progress=False,
            check=_check_servable,
        )
        shutil.copytree(prepared.path, folder, copy_function=_link, dirs_exist_ok=True)
        (folder / note).write_text(prepared.revision or "")

    build_once(target, build, deadline_s=JOB_DEADLINE)  # its lock is next to the scratch folder
    shutil.rmtree(scratch, ignore_errors=True)  # no longer used: the target exists


def _revision(config: PrepareConfig) -> str | None:
    """Return the revision for the source; a package has none.

    Raises UnsupportedModel unless the package has the requested version.
    """
    from tandem.hub import UnsupportedModel
    from tandem.hub.source import Package, parse

    wanted = config.source_revision
    source = parse(config.model)
    if wanted is None or not isinstance(source, Package):
        return wanted
    there = _version(source.name)
    if there != wanted:
        raise UnsupportedModel(f"model: {config.model} is installed as {there}, not {wanted}")
    return None


def _link(source: str, target: str) -> None:
    """Link a file if the volume supports it, else copy it."""
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _check_servable(folder: Path) -> None:
    from tandem.engine.config.servable import check_model

    check_model(folder)


def reason_of(error: Exception) -> str:
    """Return the reason for the condition ModelReady."""
    from tandem.hub import ModelNotFound, UnsupportedModel

    if isinstance(error, ModelNotFound):
        return "ModelNotFound"
    if isinstance(error, UnsupportedModel | InvalidParameter):
        return "ModelUnsupported"
    return "FetchFailed"
