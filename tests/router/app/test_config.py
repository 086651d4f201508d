"""The router's settings: what is allowed, and that each may be left out."""

from __future__ import annotations

import dataclasses

import pytest

from tandem.base.settings import settings_of
from tandem.protocol.errors import (
    InvalidParameter,
)
from tandem.router.config import RouterConfig, check_endpoint
from tandem.router.limits import Limits


def test_every_field_is_a_setting_with_a_default() -> None:
    """Each field is a flag with a default, or a limit of the limits file; the canary's token is the
    operator's."""
    settings = list(settings_of(RouterConfig))
    limits = {each.name for each in dataclasses.fields(Limits)} | {"canary_token_file"}
    names = [each.name for each in dataclasses.fields(RouterConfig)]
    assert [each.name for each in settings] == [name for name in names if name not in limits]
    assert not any(each.required for each in settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 70_000),
        ("port", "80"),
        ("port", True),
        ("max_attempts", 0),
        ("max_body_bytes", 0),
        ("target_ttft_ms", 0),
        ("target_itl_ms", 0),
        ("handoff_patience", -1),
        ("ready_prefill", -1),
        ("request_timeout", 0),
        ("request_timeout", float("inf")),
        ("keep_alive_timeout", 0),
        ("worker_wait", -1.0),
        ("resume_wait", -1.0),
        ("beat_timeout", 0.5),
        ("beat_timeout", 1.9),
        ("beat_interval", 2.1),
        ("beat_timeout", "soon"),
        ("workers", ("host",)),
        ("workers", ("host:0",)),
        ("workers", (":80",)),
    ],
)
def test_bad_settings(field: str, value: object) -> None:
    """Name the setting and what is allowed."""
    with pytest.raises(InvalidParameter) as caught:
        RouterConfig(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


def test_endpoints() -> None:
    for endpoint in ("worker-0.workers:5570", "10.0.0.1:1", "[::1]:5570"):
        assert check_endpoint("workers", endpoint) == endpoint


def test_patience_is_refused_with_strict_hand_off() -> None:
    with pytest.raises(InvalidParameter, match="handoff_patience"):
        RouterConfig(strict_handoff=True, handoff_patience=1.0)
