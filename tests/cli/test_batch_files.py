"""What `tandem run-batch` reads and writes: no answer is lost, and nothing that stands there."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import httpx
import pytest
from tests.cli.answering import Answer, served

from tandem.cli.batch import run_batch
from tandem.cli.batch.requests import Batch, BatchRequest, check_lines
from tandem.protocol.errors import InvalidParameter

URL = "/v1/completions"


def line(number: int) -> str:
    content = {"custom_id": f"c{number}", "method": "POST", "url": URL, "body": {"at": number}}
    return json.dumps(content) + "\n"


class Echo(Answer):
    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with served(Echo) as url:
        yield url


def said(path: Path) -> dict[str, int]:
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    return {each["custom_id"]: each["response"]["body"]["at"] for each in lines}


def test_a_pipe_is_answered_like_a_file(echo: str, tmp_path: Path) -> None:
    """`cat requests | tandem run-batch -i /dev/stdin`: it has nothing to say the second time, and
    the output was empty."""
    target = tmp_path / "out"
    reads, writes = os.pipe()
    os.write(writes, (line(0) + line(1)).encode())
    os.close(writes)
    try:
        done = run_batch.run(["-i", f"/dev/fd/{reads}", "-o", str(target), "--url", echo])
    finally:
        os.close(reads)
    assert done == 0
    assert said(target) == {"c0": 0, "c1": 1}


def test_an_input_that_has_become_shorter_is_no_success(
    echo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered is there, and the output is not taken for whole."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(line(0) + line(1))

    def checked(lines: BinaryIO) -> int:
        found = check_lines(lines)
        os.truncate(source, len(line(0)))
        return found

    monkeypatch.setattr(run_batch, "check_lines", checked)
    with pytest.raises(OSError, match="2 requests, 1 were sent"):
        run_batch.run(["-i", str(source), "-o", str(target), "--url", echo])
    assert not target.exists()
    assert said(target.with_name("out.part")) == {"c0": 0}


@pytest.mark.parametrize("name", ["pipe", "socket", "part", "linked"])
def test_what_is_no_file_is_not_replaced(
    name: str, echo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/null was, by who may; and what has the name of the .part was written through."""
    source = tmp_path / "in"
    source.write_text(line(0))
    for each in ("pipe", "part.part"):
        os.mkfifo(tmp_path / each)
    (tmp_path / "linked.part").symlink_to(source)
    with socket.socket(socket.AF_UNIX) as bound:
        monkeypatch.chdir(tmp_path)  # a socket's whole path may be too long for one
        bound.bind("socket")
    reader = os.open(tmp_path / "part.part", os.O_RDONLY | os.O_NONBLOCK)  # nobody waits for one
    try:
        with pytest.raises(InvalidParameter, match="--output-file"):
            run_batch.run(["-i", str(source), "-o", str(tmp_path / name), "--url", echo])
    finally:
        os.close(reader)
    assert source.read_text() == line(0)


@pytest.mark.parametrize("name", ["in", "link", "hard", "in.part"])
def test_the_input_is_not_replaced_by_its_answers(name: str, echo: str, tmp_path: Path) -> None:
    source = tmp_path / name if name == "in.part" else tmp_path / "in"
    source.write_text(line(0))
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "hard").hardlink_to(source)
    target = tmp_path / name.removesuffix(".part")
    with pytest.raises(InvalidParameter, match=r"--output-file.* another file than the input"):
        run_batch.run(["-i", str(source), "-o", str(target), "--url", echo])
    assert source.read_text() == line(0)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_link_stays_and_its_file_is_written(is_there: bool, echo: str, tmp_path: Path) -> None:
    """Beside it, so that the rename is within one file system."""
    source, link, folder = tmp_path / "in", tmp_path / "out", tmp_path / "far"
    source.write_text(line(0))
    folder.mkdir()
    if is_there:
        (folder / "answers").write_text("old")
    link.symlink_to(folder / "answers")
    assert run_batch.run(["-i", str(source), "-o", str(link), "--url", echo]) == 0
    assert link.is_symlink()
    assert said(folder / "answers") == {"c0": 0}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["far", "in", "out"]


def test_a_full_disk_is_told_as_one(echo: str) -> None:
    """As the error that it is, and not as a group of them, which is a traceback."""

    async def ask(full: BinaryIO) -> None:
        async with httpx.AsyncClient(base_url=echo) as client:
            requests = iter([BatchRequest(f"c{number}", URL, {}) for number in range(9)])
            await Batch(client, full, 1, 1).run(requests)

    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        pytest.raises(OSError, match="No space left"),
    ):
        asyncio.run(ask(full))
