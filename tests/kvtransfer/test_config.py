"""Settings explain and check themselves."""

from dataclasses import fields

import pytest

from tandem.kvtransfer.config import KVTransferConfig
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.settings import settings_of


def test_every_setting_has_words():
    """cli/ makes its help of them."""
    settings = list(settings_of(KVTransferConfig))
    assert len(settings) == len(fields(KVTransferConfig))
    for each in settings:
        assert each.help.endswith(".")
        assert each.name.startswith("kv_")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_connector", "carrier pigeon"),
        ("kv_slot_bytes", 1),
        ("kv_send_slots", 0),
        ("kv_credits", True),
        ("kv_control_port", 70000),
        ("kv_lease_seconds", 0),
        ("kv_lease_quota", 1.5),
        ("kv_beat_timeout", 0.6),
        ("kv_probe_bytes", "many"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name, value):
    """InvalidParameter carries the field."""
    with pytest.raises(InvalidParameter) as caught:
        KVTransferConfig(**{name: value})
    assert caught.value.param == name
