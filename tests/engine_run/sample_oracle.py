"""The sampler as one would say it: a token at a time, in Python numbers, over whole sorted lists.

Slow and obvious on purpose. The stages of the engine are held to these functions.
"""

import math
from collections.abc import Sequence

from tandem.kernels.bits import GAMMA, mix_int
from tandem.protocol.sampling import SamplingParams

NEVER = -math.inf
GROUP = 128
MASK = (1 << 64) - 1


def plainly_edited(
    logits: list[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos: Sequence[int] = (),
    grammar: Sequence[int] | None = None,
) -> list[float]:
    """One row after allowed ids, bad words, min tokens, what a grammar allows, logit bias and
    penalties."""
    row = list(logits)
    if params.allowed_token_ids is not None:
        row = [x if t in params.allowed_token_ids else NEVER for t, x in enumerate(row)]
    allowed = list(row)
    for word in params.bad_words_token_ids:
        before = list(word[:-1])
        if not before or list(output[-len(before) :]) == before:
            row[word[-1]] = NEVER
    if len(output) < params.min_tokens:
        for token in (*eos, *params.stop_token_ids):
            row[token] = NEVER
    if max(row) == NEVER:
        best = allowed.index(max(allowed))
        row[best] = allowed[best]
    if grammar is not None:
        row = [x if t in grammar else NEVER for t, x in enumerate(row)]
        if max(row) == NEVER:
            best = max(grammar, key=lambda t: (logits[t], -t))
            row[best] = logits[best]
    for token, number in (params.logit_bias or {}).items():
        row[token] += number
    for token in {*prompt, *output}:
        rate = params.repetition_penalty
        row[token] = row[token] / rate if row[token] > 0 else row[token] * rate
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return row


def distribution(row: Sequence[float], params: SamplingParams) -> list[float]:
    """Probability of each token of an edited row."""
    if params.greedy or params.top_k == 1:
        best = row.index(max(row))
        return [1.0 if token == best else 0.0 for token in range(len(row))]
    row = [x / params.temperature for x in row]
    if params.min_p:
        row = [x if x >= max(row) + math.log(params.min_p) else NEVER for x in row]
    if params.top_k > 0:
        floor = sorted(row, reverse=True)[: params.top_k][-1]
        row = [x if x >= floor else NEVER for x in row]
    if params.top_p < 1:
        reached, floor = 0.0, max(row)
        for x, probability in sorted(zip(row, softmax(row), strict=True), reverse=True):
            if reached >= params.top_p:
                break
            reached, floor = reached + probability, x
        row = [x if x >= floor else NEVER for x in row]
    return softmax(row)


def softmax(row: Sequence[float]) -> list[float]:
    parts = [math.exp(x - max(row)) for x in row]
    return [part / math.fsum(parts) for part in parts]


def noise(seed: int, choice: int, position: int, index: int, purpose: int = 0) -> float:
    """Standard exponential noise of one index for one draw, by the definition of its bits."""
    key = mix_int(seed + GAMMA)
    for part in (choice, position, purpose):
        key = mix_int(key + (part + 1) * GAMMA)
    bits = mix_int((key + (index + 1) * GAMMA) & MASK) >> 32
    return -math.log1p(-min((bits + 0.5) / 2**32, 1 - 2**-24))


def race(probabilities: Sequence[float], seed: int, choice: int, position: int) -> int:
    """The token drawn: the best group, then the best token in it."""

    def speed(index: int, mass: float) -> float:
        return mass / noise(seed, choice, position, index)

    groups = range(0, len(probabilities), GROUP)
    group = max(
        groups,
        key=lambda start: speed(
            (1 << 32) + start // GROUP, math.fsum(probabilities[start : start + GROUP])
        ),
    )
    tokens = range(group, min(group + GROUP, len(probabilities)))
    return max(tokens, key=lambda token: speed(token, probabilities[token]))


def chi_square_limit(freedom: int) -> float:
    """What chi-square exceeds once in a million (Wilson and Hilferty's cube)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 4.75 * math.sqrt(part)) ** 3
