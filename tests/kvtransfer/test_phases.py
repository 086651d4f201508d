"""Times of D's hand-offs: taken as things pass, counted when nobody waits."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from tandem.kvtransfer.events import Loaded, Ready
from tandem.kvtransfer.handoff.messages import Done
from tandem.kvtransfer.metrics import metrics_of
from tandem.kvtransfer.mover.consumer import Phases
from tandem.protocol.ids import RequestKey
from tandem.protocol.kv import FirstToken

KEY = RequestKey(b"R" * 16, "a", 0)
SECONDS = "tandem:kv_handoff_phase_seconds"
LOADED = {"role": "consumer", "outcome": "loaded"}


def test_a_hand_off_is_counted_behind_the_engines_word() -> None:
    """Nothing is counted on the way to the engine, and all of it once, afterwards."""
    registry = CollectorRegistry()
    phases = Phases(metrics_of(registry))

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(name, labels) or 0.0

    phases.begin(KEY)
    phases.note_event(Ready(KEY, 64))
    phases.wanted(KEY)
    phases.final(KEY)
    phases.read(KEY, 1000, 0.001)
    phases.read(KEY, 500, 0.001)
    phases.unpacked(0.001)
    phases.sent(Done(KEY, ok=True))
    told = phases.note_event(Loaded(KEY, (FirstToken(0, 1),)))

    assert isinstance(told, Loaded)
    names = [each.name for each in told.notes]
    assert names == ["wait", "reserve", "load", "commit", "part", "part"]
    assert told.first == (FirstToken(0, 1),)
    assert value(f"{SECONDS}_count", phase="read") == 0
    assert value("tandem:kv_handoffs_total", **LOADED) == 0

    for _ in range(2):  # what is counted is forgotten
        phases.settle()
        assert value(f"{SECONDS}_count", phase="read") == 2
        for phase in ("wait", "reserve", "unpack", "load", "commit", "tail"):
            assert value(f"{SECONDS}_count", phase=phase) == 1
        assert value("tandem:kv_handoff_bytes_total", role="consumer") == 1500
        assert value("tandem:kv_handoff_parts_total", role="consumer") == 2
        assert value("tandem:kv_handoffs_total", **LOADED) == 1
