"""The files of the live page: open, held to this server, and there only where they are wanted."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from tests import clear_text
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served

from tandem.router.observe.ui import page

PATHS = {route.path for route in page.routes}
Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]


def test_the_files_need_no_key_and_load_nothing_from_elsewhere(serve: Serve, decode: Make) -> None:
    """Each with its type and a policy under which nothing but this server can be asked."""
    served = serve(decode(), wait=False, api_key=("k",))
    served.wait_started()
    assert {"/ui", "/ui/app.js", "/ui/style.css"} <= PATHS
    for path in PATHS:
        answer = clear_text.get(served.url + path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert "*" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        addresses = set(re.findall(r"https?://[^\s\"'<>)]+", answer.text))
        assert addresses <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(", answer.text)
    assert clear_text.get(served.url + "/ui").headers["content-type"].startswith("text/html")
    kind = clear_text.get(served.url + "/ui/app.js").headers["content-type"]
    assert kind.startswith("text/javascript")


@pytest.mark.parametrize("path", ["/ui/page.py", "/ui/..%2fpage.py", "/ui/index.html", "/ui/x"])
def test_nothing_else_is_served(serve: Serve, decode: Make, path: str) -> None:
    """No folder is walked: a file is there or not."""
    assert clear_text.get(serve(decode()).url + path).status_code == 404


def test_who_does_not_want_it_has_no_page(serve: Serve, decode: Make) -> None:
    served = serve(decode(), ui=False)
    assert {clear_text.get(served.url + path).status_code for path in PATHS} == {404}
