"""Requests for a long run: a pool whose answers alone are known, drawn at random, some given up.

Prompts are windows of real text. A request asks for the first so many tokens of its pool entry's
answer, so whatever comes, also of one that is cancelled, must be how that answer begins.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tandem.engine.core.engine_core import EngineCore
from tandem.protocol.ids import RequestKey
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

ROUTER = b"bench-soak-00000"


@dataclass(frozen=True, slots=True)
class Entry:
    """A prompt and what one sequence alone makes of it."""

    prompt: list[int]
    answer: list[int]


@dataclass(slots=True)
class Sent:
    """A request under way."""

    entry: int
    """Index in the pool; negative: drawn at random, so not to be compared."""
    count: int
    tokens: list[int] = field(default_factory=list)


def windows(corpus: list[int], count: int, longest: int, draw: random.Random) -> list[list[int]]:
    """``count`` prompts of 4 to ``longest`` tokens, a third beginning like another."""
    made: list[list[int]] = []
    for number in range(count):
        length = round(4 * (longest / 4) ** draw.random())
        begin = draw.randrange(len(corpus) - length)
        prompt = corpus[begin : begin + length]
        if number % 3 == 2:
            prompt = [*made[-1][: draw.randrange(1, len(made[-1]) + 1)], *prompt][:longest]
        made.append(prompt)
    return made


class Traffic:
    """Sends, cancels and collects; ``found`` has every answer that could be compared."""

    def __init__(self, core: EngineCore, pool: list[Entry], draw: random.Random) -> None:
        self.core, self.pool, self.draw = core, pool, draw
        self.live: dict[str, Sent] = {}
        self.partings: dict[tuple[int, int, int], int] = {}
        """(entry, position, token that came instead) to how often."""
        self.counts = dict.fromkeys(
            ("sent", "ended", "cancelled", "compared", "equal", "tokens", "compared_tokens"), 0
        )
        self._numbers = 0

    def send(self) -> None:
        """One more request."""
        draw = self.draw
        index = draw.randrange(len(self.pool))
        entry = self.pool[index]
        count = draw.randrange(1, len(entry.answer) + 1)
        greedy = draw.random() > 0.1
        name = f"s{self._numbers}"
        self._numbers += 1
        refusal = self.core.add(request_of(name, entry.prompt, count, greedy=greedy))
        assert refusal is None, refusal
        self.live[name] = Sent(index if greedy else -1, count)
        self.counts["sent"] += 1

    def cancel(self) -> None:
        """Give up one of those under way."""
        name = self.draw.choice(list(self.live))
        if self.core.abort(RequestKey(ROUTER, name, 0)):
            self.counts["cancelled"] += 1
            self._compare(self.live.pop(name))

    def step(self) -> None:
        """One step of the engine; compare what has ended."""
        for outputs in self.core.step().outputs.values():
            for each in outputs:
                sent = self.live.get(each.request)
                if sent is None:  # its last token, after it was given up
                    continue
                assert each.position == len(sent.tokens), "positions come in order"
                sent.tokens.extend(each.token_ids)
                if each.finish is not None:
                    assert len(sent.tokens) == sent.count, f"{each.finish} at {len(sent.tokens)}"
                    self.counts["ended"] += 1
                    self._compare(self.live.pop(each.request))

    def _compare(self, sent: Sent) -> None:
        self.counts["tokens"] += len(sent.tokens)
        if sent.entry < 0 or not sent.tokens:
            return
        answer = self.pool[sent.entry].answer
        self.counts["compared"] += 1
        pairs = enumerate(zip(sent.tokens, answer, strict=False))
        at = next((at for at, (ours, theirs) in pairs if ours != theirs), None)
        self.counts["compared_tokens"] += len(sent.tokens) if at is None else at + 1
        if at is None:
            self.counts["equal"] += 1
        else:
            key = (sent.entry, at, sent.tokens[at])
            self.partings[key] = self.partings.get(key, 0) + 1


def request_of(
    name: str, prompt: list[int], count: int, *, greedy: bool = True, logprobs: int | None = None
) -> EngineCoreRequest:
    """Exactly ``count`` tokens, greedy or drawn under filters."""
    params = SamplingParams(
        temperature=0.0 if greedy else 0.8,
        top_p=1.0 if greedy else 0.9,
        top_k=0 if greedy else 40,
        seed=1,
        max_tokens=count,
        ignore_eos=True,
        logprobs=logprobs,
    )
    return EngineCoreRequest(
        key=RequestKey(ROUTER, name, 0), prompt_token_ids=list(prompt), params=params
    )
