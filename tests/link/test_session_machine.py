"""Two sessions over a channel that loses, repeats and delays, between processes that restart.

What holds all the while: what one end delivers the other process has said to this one, in order and
never twice; and once the channel is whole again, both ends stand and hear each other.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.link.liveness import LinkTimes
from tandem.link.session import LinkState, Session, Terms, Verdict
from tandem.protocol.ids import Incarnation, new_incarnation
from tandem.protocol.link import Header, read_header
from tandem.protocol.messages import Beat, Cancel, Hello, Reset, Welcome

TIMES = LinkTimes(beat_interval=1.0, beat_timeout=5.0, stall_timeout=20.0)
SECRET = "shared"
Frame = tuple[Header, object]


def terms(version: int = 1) -> Terms:
    return Terms(new_incarnation(), "test", version, TIMES, fingerprint="print", secret=SECRET)


class Ends(RuleBasedStateMachine):
    """A caller that greets whenever its link is down, and an answerer."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.said = 0
        self.caller = Session(terms())
        self.answerer_terms = terms()
        self.answerer: Session | None = None
        self.to_answerer: list[Frame] = []
        self.to_caller: list[Frame] = []
        self.heard: dict[tuple[Incarnation, Incarnation], list[int]] = {}

    # -- what the ends do ---------------------------------------------------------------------

    @precondition(lambda self: self.caller.state is not LinkState.UP)
    @rule()
    def greet(self) -> None:
        """On a connection of its own: nothing of the last one reaches the answerer any more."""
        head = read_header(self.caller.greet(self.now))
        self.to_answerer = [(head, self.caller.terms.hello())]

    @rule(by_caller=st.booleans())
    def say(self, by_caller: bool) -> None:
        """A message, numbered so that order and gaps show."""
        end = self.caller if by_caller else self.answerer
        if end is not None and end.state is LinkState.UP:
            self.said += 1
            self._send(end, Cancel("r", self.said))

    def _send(self, end: Session, message: object) -> None:
        frame = (read_header(end.seal()), message)
        (self.to_answerer if end is self.caller else self.to_caller).append(frame)

    @precondition(lambda self: self.to_answerer)
    @rule()
    def answerer_reads(self) -> None:
        header, message = self.to_answerer.pop(0)
        if isinstance(message, Hello) and header.sequence == 0:
            self.answerer = session = Session(self.answerer_terms, self.now)
            if session.answer(header, message) is None:
                self._send(session, Welcome("card"))
            else:
                self._send(session, Reset("no"))
                self.answerer = None
            return
        if self.answerer is None:
            reset = (Header(self.answerer_terms.me, header.source, 0), Reset("no such link"))
            self.to_caller.append(reset)
            return
        verdict = self.answerer.take(header, message, self.now)
        self._note(self.answerer, header, message, verdict)
        if verdict is Verdict.BROKEN:
            self._send(self.answerer, Reset(self.answerer.why))
        if self.answerer.state is LinkState.DOWN:
            self.answerer = None

    @precondition(lambda self: self.to_caller)
    @rule()
    def caller_reads(self) -> None:
        header, message = self.to_caller.pop(0)
        verdict = self.caller.take(header, message, self.now)
        self._note(self.caller, header, message, verdict)
        if verdict is Verdict.BROKEN:
            self._send(self.caller, Reset(self.caller.why))

    def _note(self, end: Session, header: Header, message: object, verdict: Verdict) -> None:
        assert (verdict in (Verdict.LOST, Verdict.BROKEN)) <= (end.state is LinkState.DOWN)
        if verdict is not Verdict.DELIVER:
            return
        assert isinstance(message, Cancel)
        assert (header.source, header.destination) == (end.peer, end.me)
        self.heard.setdefault((end.peer, end.me), []).append(message.attempt)

    # -- what goes wrong ----------------------------------------------------------------------

    @rule(by_caller=st.booleans(), at=st.integers(0, 5))
    def lose(self, by_caller: bool, at: int) -> None:
        way = self.to_answerer if by_caller else self.to_caller
        if at < len(way):
            del way[at]

    @rule(by_caller=st.booleans(), at=st.integers(0, 5))
    def repeat(self, by_caller: bool, at: int) -> None:
        """A frame comes twice, now or later."""
        way = self.to_answerer if by_caller else self.to_caller
        if at < len(way):
            way.append(way[at])

    @rule()
    def caller_restarts(self) -> None:
        """Another process calls from there; what its predecessor said is still on its way."""
        self.caller = Session(terms(), self.now)

    @rule()
    def answerer_restarts(self) -> None:
        self.answerer_terms, self.answerer = terms(), None

    @rule(seconds=st.floats(0.5, 7.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for end in (self.caller, self.answerer):
            if end is not None and end.state is LinkState.UP:
                fault = end.overdue(self.now)
                if fault is not None:
                    end.end(fault)
        if self.answerer is not None and self.answerer.state is LinkState.DOWN:
            self.answerer = None

    # -- what holds ---------------------------------------------------------------------------

    @invariant()
    def nothing_is_heard_out_of_order_or_twice(self) -> None:
        for numbers in getattr(self, "heard", {}).values():
            assert all(one < other for one, other in pairwise(numbers))

    @rule()
    def a_whole_channel_heals(self) -> None:
        """From wherever it was, within a few rounds; and then what is said is heard, all of it."""
        for _ in range(6):
            while self.to_answerer or self.to_caller:
                if self.to_answerer:
                    self.answerer_reads()
                if self.to_caller:
                    self.caller_reads()
            if self.caller.state is not LinkState.UP:
                self.greet()
            elif self._both_hear():
                return
        raise AssertionError("the link does not come to stand again")

    def _both_hear(self) -> bool:
        """One message each way; whoever does not know the other finds that out."""
        before = sum(map(len, self.heard.values()))
        self.say(True)
        self.say(False)
        while self.to_answerer or self.to_caller:
            if self.to_answerer:
                self.answerer_reads()
            if self.to_caller:
                self.caller_reads()
        return sum(map(len, self.heard.values())) == before + 2


Ends.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestEnds = Ends.TestCase


def stands() -> tuple[Session, Session]:
    """A caller and an answerer that have greeted."""
    caller, answerer = Session(terms()), Session(terms())
    assert answerer.answer(read_header(caller.greet(0.0)), caller.terms.hello()) is None
    verdict = caller.take(read_header(answerer.seal()), Welcome("card"), 0.0)
    assert verdict is Verdict.UP
    return caller, answerer


def test_a_beat_is_noted_and_judged() -> None:
    """Standing still with work is not life, however often it is said."""
    caller, answerer = stands()
    for second in range(30):
        beat = Beat(7, 3, has_work=True)
        assert caller.take(read_header(answerer.seal()), beat, float(second)) is Verdict.NOTED
    assert "no progress" in str(caller.overdue(29.0))


def test_a_reset_ends_the_link_whatever_its_number() -> None:
    caller, answerer = stands()
    answerer.seal()
    assert caller.take(read_header(answerer.seal()), Reset("enough"), 0.0) is Verdict.LOST
    assert caller.why == "it sent RESET: enough"
    assert caller.state is LinkState.DOWN
