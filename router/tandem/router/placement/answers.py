"""How long answers take for one prompt's way: its own, and those that decode beside it. Pure.

Bounds say when an answer is too slow, but not that a faster one is better. Whoever waits for an
answer before asking again, as agents do, asks the sooner for it: what such a load's rate hangs on
are the seconds of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.protocol.ids import Incarnation
from tandem.protocol.steps import Crowd
from tandem.router.placement.rates import Rates
from tandem.router.placement.snapshot import PromptFacts, WorkerView

MOST_SHARE = 0.9
"""Of a worker's time, what prompts are taken to need at most, where a step's length is told."""


def expected_tokens(
    prompt: PromptFacts,
    workers: Sequence[WorkerView],
    rates: Mapping[Incarnation, Rates | None],
) -> float:
    """Tokens of an answer: as many as are drawn in the time that requests stay where they stay
    longest, which is where they decode, and not more than the prompt asks for; 0 while unknown."""
    tokens = 0.0
    longest = max(workers, key=lambda each: each.residence_s, default=None)
    known = None if longest is None else rates[longest.incarnation]
    if longest is not None and known is not None:
        step = token_seconds(known, max(longest.crowd, Crowd(1)), longest.prompt_share)
        tokens = longest.residence_s / step if step else 0.0
    return tokens if prompt.max_new_tokens is None else min(tokens, float(prompt.max_new_tokens))


def token_seconds(rates: Rates, crowd: Crowd, share: float) -> float:
    """Mean seconds from token to token in ``crowd``, on a worker of whose time prompts take
    ``share``; 0 while unknown."""
    return rates.decodes(crowd) / (1.0 - min(MOST_SHARE, share))


def lengthened(rates: Rates, crowd: Crowd, context: int, tokens: float, share: float) -> float:
    """Seconds by which the answers of ``crowd`` take longer, together, for one of ``tokens`` behind
    ``context`` that joins them: of each as many are still to come, as answers end at random."""
    if not crowd.streams:
        return 0.0
    before = token_seconds(rates, crowd, share)
    after = token_seconds(rates, crowd.joined(context), share)
    return crowd.streams * tokens * max(0.0, after - before)
