"""Which answers of services without tokens a canary takes for right."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.operator.api.service import Task
from tandem.operator.probes.canary import POOLED, CanaryError

RIGHT: dict[Task, list[dict[str, Any]]] = {
    Task.EMBED: [{"embedding": [1.0, 0.0]}, {"embedding": [0.0, 2.0]}, {"embedding": [1.0, 0.05]}],
    Task.CLASSIFY: [{"probs": [0.5, 0.5]}, {"probs": [0, 1]}],
    Task.SCORE: [{"score": 0.5}, {"score": -3}],
}


def judged(task: Task, data: object) -> str:
    _, _, judge = POOLED[task]
    return judge({"data": data})


@pytest.mark.parametrize("task", RIGHT)
def test_right_answers_are_told_in_words(task: Task) -> None:
    assert "text" in judged(task, RIGHT[task])


@pytest.mark.parametrize("task", RIGHT)
@pytest.mark.parametrize("data", [None, [], "abc", [1, 2, 3], [1, 2], [{}, {}, {}], [{}, {}]])
def test_answers_of_another_form_are_wrong(task: Task, data: object) -> None:
    with pytest.raises(CanaryError):
        judged(task, data)


@pytest.mark.parametrize(
    ("task", "index", "item", "match"),
    [
        (Task.EMBED, 2, {"embedding": [0.0, 1.0]}, "cosine of 0.000"),
        (Task.EMBED, 1, {"embedding": [0.0, 0.0]}, "all zeros"),
        (Task.EMBED, 1, {"embedding": [1.0]}, "one model returned vectors of"),
        (Task.EMBED, 0, {"embedding": [float("nan"), 1.0]}, "not finite numbers"),
        (Task.EMBED, 0, {"embedding": []}, "not finite numbers"),
        (Task.CLASSIFY, 1, {"probs": [1.0]}, "one model returned"),
        (Task.CLASSIFY, 1, {"probs": ["a", "b"]}, "not finite numbers"),
        (Task.SCORE, 0, {"score": None}, "not finite numbers"),
    ],
)
def test_numbers_that_no_model_gives_are_wrong(
    task: Task, index: int, item: dict[str, Any], match: str
) -> None:
    """Vectors that differ for one text, zeros, holes, other lengths."""
    data = list(RIGHT[task])
    data[index] = item
    with pytest.raises(CanaryError, match=match):
        judged(task, data)
