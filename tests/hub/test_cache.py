import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tandem.hub import CacheBusy
from tandem.hub.cache import build_once, cache_root

pytestmark = pytest.mark.timeout(600)


def test_root_prefers_argument_then_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Argument, TANDEM_CACHE, XDG_CACHE_HOME and the home folder are asked in this order."""
    monkeypatch.delenv("TANDEM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path.home() / ".cache" / "tandem"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "tandem"
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    assert cache_root(tmp_path / "given") == tmp_path / "given"


def test_built_once(tmp_path: Path):
    """A second call finds the entry and builds nothing."""
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "file").write_text("x")

    entry = tmp_path / "deep" / "entry"
    assert build_once(entry, build) == build_once(entry, build) == entry
    assert (entry / "file").read_text() == "x"
    assert len(built) == 1


def test_failure_leaves_nothing(tmp_path: Path):
    """A build that fails leaves no entry, and the next call builds again."""

    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError("disk full")

    entry = tmp_path / "entry"
    with pytest.raises(OSError, match="disk full"):
        build_once(entry, fail)
    assert not entry.exists()
    build_once(entry, lambda folder: None)
    assert not list(entry.iterdir())


def test_remains_of_a_killed_process_are_swept(tmp_path: Path):
    """A half-built folder of a process that was killed does not reach the entry."""
    (tmp_path / "entry.partial").mkdir()
    (tmp_path / "entry.partial" / "half").touch()
    entry = build_once(tmp_path / "entry", lambda folder: (folder / "whole").touch())
    assert [file.name for file in entry.iterdir()] == ["whole"]


def test_an_entry_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A node may crash at any moment, and a name whose content was never written counts as whole:
    files and folders first, then the name, then the folder that has it."""
    entry = tmp_path / "deep" / "entry"
    written: list[tuple[int, bool]] = []
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        written.append((os.fstat(descriptor).st_ino, entry.exists()))
        plain(descriptor)

    def build(folder: Path) -> None:
        (folder / "below").mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "below" / "file").write_text("x")

    monkeypatch.setattr(os, "fsync", fsync)
    build_once(entry, build)
    inside = [entry, *entry.rglob("*")]
    assert {(each.stat().st_ino, False) for each in inside} == set(written[:-1])
    assert written[-1] == (entry.parent.stat().st_ino, True)


def test_lock_has_a_deadline(tmp_path: Path):
    """Waiting for another process ends with an error that names the lock."""
    with (
        FileLock(tmp_path / "entry.lock"),
        pytest.raises(CacheBusy, match=r"entry\.lock"),
    ):
        build_once(tmp_path / "entry", lambda folder: None, deadline_s=0.05)


_RACER = """
import sys, pathlib
from tandem.hub.cache import build_once
entry, log = map(pathlib.Path, sys.argv[1:])
def build(folder):
    with log.open("a") as file:
        file.write("built\\n")
    (folder / "done").touch()
print("ready", flush=True)
sys.stdin.readline()
build_once(entry, build)
assert (entry / "done").exists()
"""


def test_two_processes_build_once(tmp_path: Path):
    """Processes that start together share one build and all see the whole entry."""
    log = tmp_path / "log"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, str(tmp_path / "entry"), str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ,
        )
        for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == b"ready\n"
    for racer in racers:
        racer.communicate(b"go\n", timeout=300)
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert log.read_text() == "built\n"
