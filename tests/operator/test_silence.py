"""Which routers count as gone: by virtual time, without a cluster."""

from __future__ import annotations

from tandem.operator.decide.observe import PodView
from tandem.operator.desired.naming import Role
from tandem.operator.probes.reach import PROBATION, TRIES, Silence

PATIENCE = 4.0


def router(name: str, node: str, *, ready: bool = True) -> PodView:
    return PodView(
        name=name, uid=name, ip="10.0.0.1", node=node, role=Role.ROUTER, revision="r", ready=ready,
        deleting=False, created=0, pending_since=None, problem=None, annotations={},
        key_generation=1,
    )  # fmt: skip


class Clock:
    """Asks once a second, and takes out what is gone."""

    def __init__(self, *pods: PodView, patience: float = PATIENCE) -> None:
        self.pods = list(pods)
        self.silence = Silence(patience)
        self.silence.see(self.pods)
        self.now = 100.0

    def ask(self, *answered: str, rounds: int = 1, seen: bool = True) -> list[str]:
        """Rounds in which those answer; who is taken out in them. What becomes of the pods is not
        ``seen`` while looks are slow."""
        taken = []
        for _ in range(rounds):
            asked = {pod.uid for pod in self.silence.asked()}
            began, self.now = self.now, self.now + 1
            self.silence.record_round(began, asked, asked & set(answered))
            for pod in self.silence.gone(self.now):
                self.silence.taken_out(pod, self.now)
                taken.append(pod.name)
                if seen:
                    self._become(pod.name, ready=False)
        return taken

    def _become(self, name: str, *, ready: bool) -> None:
        self.pods = [
            router(pod.name, str(pod.node), ready=ready) if pod.name == name else pod
            for pod in self.pods
        ]
        self.silence.see(self.pods)

    def object(self, name: str) -> None:
        """The pod's kubelet says that it is ready."""
        self._become(name, ready=True)


def test_a_router_is_gone_after_its_tries_and_seconds():
    """Not at the third silent round, and at the fourth: then it has been silent for 4 s."""
    clock = Clock(router("x", "a"), router("y", "b"))
    assert clock.ask("x", "y", rounds=3) == []
    assert clock.ask("x", rounds=TRIES - 1) == []
    assert clock.ask("x") == ["y"]
    assert clock.ask("x", rounds=60) == []


def test_patience_is_kept_however_fast_the_rounds_are():
    """Many tries in a short time are no long silence."""
    clock = Clock(router("x", "a"), router("y", "b"), patience=10)
    assert clock.ask("x", rounds=9) == []
    assert clock.ask("x") == ["y"]


def test_one_answer_begins_it_anew():
    """A router that answers in between is there."""
    clock = Clock(router("x", "a"), router("y", "b"))
    for _ in range(5):
        assert clock.ask("x", rounds=TRIES - 1) == []
        assert clock.ask("x", "y") == []


def test_where_nobody_answers_the_operator_is_cut_off():
    """Neither all at once nor the last that answered: rounds without any answer do not count."""
    clock = Clock(router("x", "a"), router("y", "b"))
    assert clock.ask(rounds=60) == []
    assert clock.ask("x", rounds=TRIES - 1) == []
    assert clock.ask("x") == ["y"]
    assert clock.ask(rounds=60) == []


def test_a_node_with_a_router_that_answers_lives():
    """What another router of that node lacks is its kubelet's to say."""
    clock = Clock(router("x", "a"), router("y", "b"), router("z", "b"))
    assert clock.ask("x", "z", rounds=60) == []
    assert clock.ask("x", rounds=TRIES) == ["y", "z"]


def test_routers_of_one_node_are_not_asked():
    """There is nobody who could tell that node's death from the operator's own."""
    assert Clock(router("x", "a"), router("y", "a")).silence.asked() == ()


def test_one_node_at_a_time():
    """The second is judged when the first one's kubelet has had the time to object."""
    clock = Clock(router("x", "a"), router("y", "b"), router("z", "c"))
    assert clock.ask("x", rounds=TRIES) == ["y"]
    assert clock.ask("x", rounds=int(PROBATION) - 1) == []
    assert clock.ask("x") == ["z"]


def test_an_objection_is_believed_until_the_router_answers_again():
    """Taken out once and never again, as long as the operator alone does not reach it."""
    clock = Clock(router("x", "a"), router("y", "b"))
    assert clock.ask("x", rounds=TRIES) == ["y"]
    clock.object("y")
    assert clock.ask("x", rounds=100) == []
    assert clock.ask("x", "y") == []
    assert clock.ask("x", rounds=TRIES) == ["y"]


def test_who_was_taken_out_is_not_taken_out_again_by_the_next_round():
    """Looks that tell of it may be rounds behind; the kubelet's objection counts when they come."""
    clock = Clock(router("x", "a"), router("y", "b"))
    assert clock.ask("x", rounds=TRIES, seen=False) == ["y"]
    assert clock.ask("x", rounds=30, seen=False) == []
    clock.object("y")
    assert clock.ask("x", rounds=30) == []
    assert clock.ask("x", "y") == []
    assert clock.ask("x", rounds=TRIES) == ["y"]


def test_a_router_whose_neighbour_is_out_already_follows():
    """The API server took the word on one of them only: the other's turn is the next round."""
    clock = Clock(router("x", "a"), router("y", "b"), router("z", "b"))
    assert clock.ask("x", rounds=TRIES - 1) == []
    asked = {pod.uid for pod in clock.silence.asked()}
    clock.silence.record_round(clock.now, asked, {"x"})
    clock.now += 1
    first, _ = clock.silence.gone(clock.now)
    clock.silence.taken_out(first, clock.now)
    assert clock.ask("x") == ["z"]


def test_a_router_that_came_in_the_middle_of_a_round_is_not_judged_by_it():
    clock = Clock(router("x", "a"), router("y", "b"))
    asked = {pod.uid for pod in clock.silence.asked()}
    clock.pods.append(router("new", "c"))
    clock.silence.see(clock.pods)
    for _ in range(TRIES):
        clock.silence.record_round(0.0, asked, {"x", "y"})
    assert clock.silence.gone(1000.0) == []
