"""Idle threads leave the cores to others, unless the user says otherwise."""

import os

import pytest

from tandem.engine.executor.openmp import SPIN_COUNT, limit_spinning


def test_spinning_is_limited_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that shares its cores sets a short spin."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    limit_spinning()

    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither variable of the user's is overridden."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
