"""Commands that the documents show: the real parsers take them, and what they name is there.

What can run here does so in ``tests/e2e/test_documents.py``; install.md's is run on a cluster.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tandem.cli.__main__ import COMMANDS, main
from tandem.cli.serve import up
from tandem.cli.settings import command, flags
from tandem.cli.settings.command import Parser

ROOT = Path(__file__).parent.parent
PAGES = sorted([
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md",
    *(ROOT / "docs").rglob("*.md"),
])  # fmt: skip
_BLOCK = re.compile(r"^```(?:sh|console|bash)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`(?:\.venv/bin/)?(tandem [a-z-]+(?: [^`]*)?)`")
_FILE = re.compile(r"(?:charts|manifests|examples|bench|scripts|images)/[\w./-]+")
_TANDEM = re.compile(r"(?:^|/)tandem$")
_SHOWN_ONLY = ("...", "…", "COMMAND", "|", "FLAG")
"""Marks of words that stand for others."""


class Parsed(Exception):
    """A command line was taken; nothing is to run."""


def blocks() -> Iterator[tuple[str, str]]:
    """Page and text of each block of commands."""
    for page in PAGES:
        for number, found in enumerate(_BLOCK.finditer(page.read_text())):
            yield f"{page.relative_to(ROOT)}#{number}", found[1]


def lines(text: str) -> Iterator[list[str]]:
    """The commands of a block as words, of a prompt's lines alone where it shows prompts."""
    joined = re.sub(r"\\\n\s*", " ", text)
    shows_prompts = any(line.startswith("$ ") for line in joined.splitlines())
    for line in joined.splitlines():
        if shows_prompts and not line.startswith("$ "):
            continue
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:  # a text of several lines
            continue
        yield words


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each `tandem` command of a block, and where it stands."""
    for where, text in blocks():
        for words in lines(text):
            for at, word in enumerate(words):
                if _TANDEM.search(word) and at + 1 < len(words) and words[at + 1] in COMMANDS:
                    rest = words[at + 1 :]
                    ends = [
                        i for i, each in enumerate(rest) if each in ("|", "&", ";", "&&", "...")
                    ]
                    yield where, rest[: min(ends, default=len(rest))]
                    break


def inline() -> Iterator[tuple[str, list[str]]]:
    """`tandem` commands within sentences, that are whole."""
    for page in PAGES:
        for found in _INLINE.finditer(page.read_text()):
            words = found[1].split()[1:]
            if words[0] in COMMANDS and not any(m in found[1] for m in _SHOWN_ONLY):
                yield str(page.relative_to(ROOT)), words


ALL = list(commands())
SAID = list(inline())


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands read what they are given, check it, and stop."""
    read, settings = Parser.read, flags.read_settings

    def reading(self: Parser, *args: Any, **options: Any) -> Any:
        found = read(self, *args, **options)
        if self.prog in PLAIN:
            raise Parsed
        return found

    def checked(parsed: Any, sections: Any, environ: Any) -> Any:
        given = settings(parsed, sections, environ)
        if parsed_by_stack:
            return given
        raise Parsed

    def stack(self: up.Supervisor) -> NoReturn:
        self.check_flags()
        raise Parsed

    parsed_by_stack: list[bool] = []
    monkeypatch.setattr(Parser, "read", reading)
    monkeypatch.setattr(command, "read_settings", checked)
    monkeypatch.setattr(up.Supervisor, "run", stack)
    monkeypatch.setattr(command, "STACKS", parsed_by_stack, raising=False)


PLAIN = {f"tandem {name}" for name in ("chat", "top", "explain", "run-batch", "bench kernels")}
PLAIN |= {"tandem explain service"}


def taken(words: list[str]) -> bool:
    if words[0] in ("up", "serve"):
        command.STACKS.append(True)  # type: ignore[attr-defined]
    try:
        return main(words) == 0
    except (Parsed, SystemExit) as ended:
        return isinstance(ended, Parsed) or ended.code == 0
    finally:
        command.STACKS.clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("where", "words"), ALL)
def test_a_command_of_a_block_is_taken(
    where: str, words: list[str], parse_only: None, capsys: pytest.CaptureFixture[str]
):
    """By the parser that reads it, and by the settings that check it."""
    assert taken(words), f"{where}: {capsys.readouterr().err}"


@pytest.mark.parametrize(("where", "words"), SAID)
def test_a_command_within_a_sentence_is_taken(
    where: str, words: list[str], parse_only: None, capsys: pytest.CaptureFixture[str]
):
    """Its flags are flags; a value may be a name that stands for one."""
    if not taken(words):
        said = capsys.readouterr().err
        assert "is not a flag" not in said, f"{where}: {said}"


@pytest.mark.parametrize(("where", "text"), list(blocks()))
def test_files_and_targets_that_a_block_names_are_there(where: str, text: str):
    """Charts, manifests, examples, programs, and targets of make."""
    for found in _FILE.findall(text):
        assert (ROOT / found.rstrip("./")).exists(), f"{where} names {found}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in lines(text):
        if words[:1] == ["make"]:
            assert [each for each in words[1:] if "=" not in each and each not in targets] == []


def test_commands_were_found():
    """The expressions above find what they are for."""
    assert len(ALL) > 10
    assert {words[0] for _, words in ALL} >= {"serve", "up", "router", "prefill", "decode"}
    assert len(SAID) > 20


@pytest.mark.parametrize(
    "words",
    [["serve", "m", "--bogus", "1"], ["up", "m", "--decode.max-num-seqs", "0"], ["top", "x"]],
)
def test_a_wrong_command_would_be_found(words: list[str], parse_only: None):
    assert not taken(words)
