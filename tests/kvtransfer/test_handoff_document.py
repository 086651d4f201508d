"""docs/handoff.md says what the tables say."""

from pathlib import Path

from tandem.kvtransfer.handoff import consumer, producer
from tandem.kvtransfer.handoff.document import document
from tandem.kvtransfer.handoff.tables import CONSUMER, PRODUCER, DEvent, PEvent

_PAGE = Path(__file__).parents[2] / "docs" / "handoff.md"


def test_the_page_is_current():
    assert _PAGE.read_text() == document()


def test_every_event_has_a_handler_and_a_rule():
    """No event can arrive that a machine has no code for, and no code is without an event."""
    assert set(producer._HANDLERS) == set(PEvent) == {event for _, event in PRODUCER}
    assert set(consumer._HANDLERS) == set(DEvent) == {event for _, event in CONSUMER}


def test_no_state_is_a_dead_end():
    """Every state that a rule leads to has rules of its own."""
    for rules in (PRODUCER, CONSUMER):
        states = {state for state, _ in rules}
        assert {after for rule in rules.values() for after in rule.next} <= states
