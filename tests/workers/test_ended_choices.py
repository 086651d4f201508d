"""A router that tells of a choice's end, over a real link."""

from __future__ import annotations

from tests.engine_plan.builders import params_of
from tests.workers.hand_router import Router
from tests.workers.proc_worker import Worker, submit

from tandem.protocol.messages import Cancel, Frame


def test_the_choices_that_a_cancel_names_end_and_others_go_on(
    worker: Worker, router: Router
) -> None:
    """The worker says in its card that it knows of such."""
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
