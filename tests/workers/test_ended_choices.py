"""A router that tells of a choice's end, over a real link."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from tests.engine_plan.builders import params_of
from tests.workers.hand_router import Router
from tests.workers.proc_worker import Worker, submit

from tandem.engine.step import ModelRunnerOutput, SchedulerOutput
from tandem.protocol.messages import Cancel, Frame
from tandem.worker.io import FromRouter, Item


def test_the_choices_that_a_cancel_names_end_and_others_go_on(
    worker: Worker, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker says in its card that it knows of such."""
    heard, execute, offer = threading.Event(), worker.executor.execute, worker.inbox.offer

    def held(plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        assert heard.wait(20), "the worker never heard of the end"
        return execute(plan)

    def noted(item: Item) -> bool:
        is_taken = offer(item)
        if isinstance(item, FromRouter) and isinstance(item.message, Cancel):
            heard.set()
        return is_taken

    monkeypatch.setattr(worker.executor, "execute", held)
    monkeypatch.setattr(worker.inbox, "offer", noted)
    submit(router, "a", params=params_of(n=2, temperature=1.0, max_tokens=200, ignore_eos=True))
    router.say(Cancel("a", 0, choices=(0,)))
    said, ended = [0, 0], set()
    while 1 not in ended:
        for output in router.hear(Frame).outputs:
            said[output.choice] += 1
            if output.finish is not None:
                ended.add(output.choice)
    assert said[0] < said[1] == 200
    assert ended == {1}
    assert worker.core.card().ends_choices
