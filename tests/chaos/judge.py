"""The verdict on every request, against what the same question gave while nothing was broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tests.chaos.load import Answer
from tests.chaos.schedule import Ask, Schedule

AROUND = 20.0
"""Seconds before an answer's end within which faults are named with it."""
REFUSALS = (429, 503)


class Verdict(StrEnum):
    RIGHT = "right"
    LEFT = "left, right so far"
    REFUSED = "refused, with Retry-After"
    UNSTABLE = "left out: its answer differs without faults"
    WRONG = "wrong tokens"
    HUNG = "hung past its deadline"
    FAILED = "failed"

    @property
    def fine(self) -> bool:
        """Whether a server may answer so while it is hurt."""
        return self not in (Verdict.WRONG, Verdict.HUNG, Verdict.FAILED)


@dataclass(frozen=True, slots=True)
class Truth:
    texts: tuple[str, ...]
    finishes: tuple[str | None, ...]


def truths_of(
    asks: tuple[Ask, ...], passes: list[dict[int, Answer]]
) -> tuple[dict[int, Truth], frozenset[int]]:
    """By question: what all fault-free passes agreed on; and the questions on which they did not:
    near-ties that rounding decides, which depends on who shares a step. ``asks`` are those of the
    passes. Raises AssertionError for a pass with an answer that is none."""
    found: dict[int, Truth] = {}
    unstable = set()
    for answers in passes:
        for ask in asks:
            answer = answers[ask.number]
            whole = answer.status == 200 and None not in answer.finishes
            assert whole, f"without faults, {ask} gave {answer}"
            truth = Truth(tuple(answer.texts), tuple(answer.finishes))
            if found.setdefault(ask.question, truth) != truth:
                unstable.add(ask.question)
    return found, frozenset(unstable)


def judge(answer: Answer, truth: Truth) -> Verdict:
    if answer.hung:
        return Verdict.HUNG
    if any(not is_beginning(answer, truth, choice) for choice in range(len(truth.texts))):
        return Verdict.WRONG
    if answer.left:
        return Verdict.LEFT
    if answer.broken is not None or answer.error is not None or answer.status != 200:
        refused = answer.status in REFUSALS and answer.retry_after is not None
        return Verdict.REFUSED if refused else Verdict.FAILED
    whole = Truth(tuple(answer.texts), tuple(answer.finishes)) == truth
    return Verdict.RIGHT if whole else Verdict.WRONG


def is_beginning(answer: Answer, truth: Truth, choice: int) -> bool:
    """Whether a choice is right as far as it came: to the end, if it says that it ended."""
    text, finish = answer.texts[choice], answer.finishes[choice]
    if finish is None:
        return truth.texts[choice].startswith(text)
    return (text, finish) == (truth.texts[choice], truth.finishes[choice])


@dataclass(slots=True)
class Report:
    """What a run came to; ``problems`` is empty if all held."""

    counts: Counter[Verdict] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest: float = 0.0
    """Seconds of the longest request."""

    def __str__(self) -> str:
        """A line a verdict, a line a problem."""
        lines = [f"{count:6} {verdict}" for verdict, count in self.counts.most_common()]
        lines.append(f"slowest request: {self.slowest:.1f} s")
        return "\n".join([*lines, *(f"PROBLEM: {each}" for each in self.problems)])


def report_of(
    schedule: Schedule,
    answers: Mapping[int, Answer],
    truths: Mapping[int, Truth],
    unstable: frozenset[int] = frozenset(),
    struck: Mapping[str, float] | None = None,
) -> Report:
    """Verdicts on a run. ``struck``: when each fault struck, on the clock of ``Answer.sent``."""
    report = Report()
    for ask in schedule.asks:
        answer = answers.get(ask.number)
        if answer is None:
            report.problems.append(f"request {ask.number} has no answer at all")
            continue
        report.slowest = max(report.slowest, answer.seconds)
        verdict = judge(answer, truths[ask.question])
        if verdict is Verdict.WRONG and ask.question in unstable:
            verdict = Verdict.UNSTABLE
        report.counts[verdict] += 1
        if not verdict.fine:
            report.problems.append(_problem(schedule, ask, answer, truths, verdict, struck or {}))
    return report


def _problem(
    schedule: Schedule,
    ask: Ask,
    answer: Answer,
    truths: Mapping[int, Truth],
    verdict: Verdict,
    struck: Mapping[str, float],
) -> str:
    """Everything that helps to find out what happened."""
    end = answer.sent + answer.seconds
    near = [
        f"{fault} ({when - answer.sent:+.2f} s)"
        for fault, when in struck.items()
        if answer.sent - AROUND < when < end
    ]
    question = schedule.questions[ask.question]
    said = answer.broken or answer.error or ""
    return (
        f"seed {schedule.seed}, request {ask.number} ({verdict}) after {answer.seconds:.2f} s, "
        f"HTTP {answer.status} {said}\n    asked: {ask} max_tokens {question.max_tokens} "
        f"temperature {question.temperature} n {question.n} stop {question.stop!r} "
        f"prompt of {len(question.prompt.split())} words\n"
        f"    got {answer.texts} {answer.finishes}\n    due {truths[ask.question]}\n"
        f"    faults near it: {'; '.join(near) or 'none'}"
    )
