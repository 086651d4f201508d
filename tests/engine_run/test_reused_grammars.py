"""A grammar is kept for the next answer of its text: no answer pays for those before it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.engine_plan.builders import params_of, request_of
from tests.engine_run.patience import SECONDS
from tokenizers.pre_tokenizers import ByteLevel

from tandem.engine.request import Request, RequestGroup, TokenConstraint
from tandem.engine.step import SeqId
from tandem.engine.structured import StructuredOutputManager
from tandem.engine.structured.backends import guidance
from tandem.engine.structured.backends.guidance import GuidanceBackend
from tandem.engine.structured.constraint import Constraint, MaskThreads
from tandem.engine.structured.errors import ExhaustedError, GrammarError
from tandem.protocol.ids import BlockHash
from tandem.protocol.structured import StructuredOutputsParams

BYTES = sorted(ByteLevel.alphabet())
WORDS = {"type": "string", "pattern": "^[A-Za-z]+( [A-Za-z]+){0,60}$", "maxLength": 500}
LENGTH = 120
STATES = 1_000
"""Enough for any of the answers drawn here, and for some twenty that follow each other."""


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StructuredOutputManager]:
    flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", **flags},
        "decoder": {"type": "ByteLevel", **flags},
        "model": {"type": "BPE", "vocab": {c: at for at, c in enumerate(BYTES)}, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr(guidance, "LEXER_STATES", STATES)
    made = StructuredOutputManager(
        lambda name: GuidanceBackend(tmp_path, len(BYTES)), vocab_size=len(BYTES)
    )
    yield made
    made.close()


def request_for(number: int, emitted: tuple[int, ...] = ()) -> Request:
    """The ``number``-th that asks for words."""
    wanted = StructuredOutputsParams(json=json.dumps(WORDS))
    params = params_of(structured_outputs=wanted, max_tokens=LENGTH)
    source = request_of(f"r{number}", 2, params=params, emitted=(emitted,) if emitted else ())
    group = RequestGroup(
        source=source,
        root=BlockHash(b"r" * 32),
        block_size=16,
        arrival=0.0,
        number=number,
        turn=0,
        deadline=None,
        max_model_len=1000,
    )
    tokens = [*source.prompt_token_ids, *emitted]
    return Request(
        SeqId(number),
        group,
        (0,),
        token_ids=tokens,
        num_prompt=2,
        order=(0, number, 0, 0),
        max_len=1000,
        block_hashes=[],
    )


def let_in(manager: StructuredOutputManager, request: Request) -> TokenConstraint:
    """The constraint of a request once it is made."""
    assert manager.admit(request) is None
    manager._begun[request.seq].constraint.result(SECONDS)
    assert manager.failed(request) is None
    manager.enter(request)
    assert request.constraint is not None
    return request.constraint


def follow(constraint: TokenConstraint, rng: random.Random, most: int = LENGTH) -> list[int]:
    """Draw ``most`` tokens, of ``LENGTH`` to the answer's end; what came."""
    came: list[int] = []
    quote, space = BYTES.index('"'), BYTES.index("Ġ")
    while len(came) < most:
        assert constraint.is_ready(SECONDS)
        mask = constraint.mask
        allowed = [at for at in range(len(BYTES)) if mask[at // 8] >> at % 8 & 1]
        token = rng.choice([at for at in allowed if at != quote or not came or most == LENGTH])
        if space in allowed and rng.random() < 0.15:
            token = space
        if quote in allowed and len(came) > LENGTH - 20:
            token = quote
        came.append(token)
        if constraint.accept(token):
            break
    return came


def test_no_answer_ends_by_those_before_it(manager: StructuredOutputManager):
    """What a lexer keeps of each answer comes to its bound again and again; the one that meets it
    goes on, and so do a further choice and one that is resumed."""
    rng = random.Random(1)
    for number in range(60):
        request = request_for(number)
        constraint = let_in(manager, request)
        started = follow(constraint, rng, 30) if number % 3 == 2 else []
        if number % 20 == 19 and constraint.is_ready(SECONDS):
            follow(constraint.fork(), rng)
        if number % 3 == 2:
            manager.release(request)
            request = request_for(number, tuple(started))
            constraint = let_in(manager, request)
        follow(constraint, rng)
        manager.release(request)


def test_an_answer_that_is_too_much_by_itself_is_an_error(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
):
    """A new grammar is not replaced, nor is that of whoever comes after it."""
    monkeypatch.setattr(guidance, "LEXER_STATES", 40)
    for number in range(2):
        request = request_for(number)
        constraint = let_in(manager, request)
        with pytest.raises(ExhaustedError, match="too many states"):
            follow(constraint, random.Random(number))
        manager.release(request)


class Line:
    """Allows the next of ``TOKENS`` alone; takes so many, and has masks for so many."""

    def __init__(self, takes: int, masks: int) -> None:
        self.takes, self.masks = takes, masks
        self.came: list[int] = []

    @property
    def is_terminated(self) -> bool:
        return self.came == TOKENS

    is_accepting = is_terminated

    def accept(self, token_ids: Sequence[int]) -> None:
        if len(self.came) + len(token_ids) > self.takes:
            raise ExhaustedError("full")
        if TOKENS[: len(self.came) + len(token_ids)] != [*self.came, *token_ids]:
            raise GrammarError("another token")
        self.came += token_ids

    def fill(self, words: memoryview) -> None:
        if len(self.came) >= self.masks:
            raise ExhaustedError("full")
        words[0] = 1 << TOKENS[len(self.came)]

    def copy(self) -> Line:
        other = Line(self.takes, self.masks)
        other.came = self.came.copy()
        return other


TOKENS = [1, 2, 3]


@pytest.mark.parametrize(("takes", "masks", "count"), [(3, 1, 1), (3, 2, 2), (1, 3, 2), (2, 3, 3)])
def test_a_token_that_exhausts_a_grammar_is_followed_by_a_new_one(
    takes: int, masks: int, count: int
):
    """Beside the step loop, with the tokens so far; its answer may be over then. So it is for a
    choice that went on from there."""
    threads, told = MaskThreads(1), list[list[int]]()

    def renew(tokens: Sequence[int]) -> Line:
        told.append(list(tokens))
        renewed = Line(3, 3)
        renewed.accept(tokens)
        return renewed

    def follow_on(constraint: Constraint, tokens: Sequence[int]) -> None:
        over = False
        for token in tokens:
            assert constraint.is_ready(SECONDS)
            assert bytes(constraint.mask) == bytes([1 << token, 0, 0, 0])
            over = constraint.accept(token)
        assert over or (constraint.is_ready(SECONDS) and constraint.is_dead)
        assert constraint.is_terminated

    first = Constraint(
        Line(takes, masks),
        bytes([1 << 1, 0, 0, 0]),
        vocab_size=32,
        ends=(),
        threads=threads,
        wake=lambda: None,
        refuse=lambda words: words,  # type: ignore[arg-type, return-value]
        renew=renew,
    )
    second = first.fork()
    follow_on(first, TOKENS)
    follow_on(second, TOKENS)
    assert told == 2 * [TOKENS[:count]]
    threads.close()
