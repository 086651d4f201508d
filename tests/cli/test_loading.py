"""What is imported before a command runs is nothing that the collector of garbage looks at."""

from __future__ import annotations

import gc

import pytest

from tandem.cli.serve.own_server import loading


def test_what_is_loaded_is_not_looked_at_and_what_follows_is() -> None:
    """Neither meanwhile nor later; also where an import fails."""
    try:
        with loading():
            assert not gc.isenabled()
            loaded = [[object()]]
        assert gc.isenabled()
        assert not any(each is loaded for each in gc.get_objects())
        with pytest.raises(ImportError), loading():
            raise ImportError("nothing there")
        assert gc.isenabled()
        made = [[object()]]
        assert any(each is made for each in gc.get_objects())
    finally:
        gc.enable()
