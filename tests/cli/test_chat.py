"""`tandem chat` before it talks to anybody."""

from __future__ import annotations

import pytest

from tandem.cli import chat
from tandem.protocol.errors import InvalidParameter


@pytest.mark.parametrize("url", ["notaurl", "ftp://127.0.0.1", "http://", "http://[::1", ""])
def test_what_is_no_url_is_named(url: str) -> None:
    """A word in place of a URL is an error that names the flag, not a traceback."""
    with pytest.raises(InvalidParameter, match="--url") as raised:
        chat.run(["--url", url, "Hello"])
    assert "http://127.0.0.1" in str(raised.value)


def test_nobody_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that is not there is said in a line with the address."""
    assert chat.run(["--url", "http://127.0.0.1:9", "Hello"]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
