"""When /ready says that a request could be served."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests import clear_text
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.protocol.pooling import ModelPooling
from tandem.router.config import RouterConfig

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]


def loop_add(served: Served, worker: FakeWorker) -> None:
    """Add an address from outside the server's loop."""
    pool = served.app.state.router.pool
    loop = pool._ticker.get_loop()
    loop.call_soon_threadsafe(pool.add, worker.endpoint)


def test_ready_waits_for_the_fleet(serve: Serve, prefill: Make, decode: Make) -> None:
    """503 with the reason until the configured fleet was there once; then while one can serve."""
    d = decode(links_up=False)
    served = serve(d, wait=False, ready_prefill=1)
    wait_for(lambda: served.server.started)
    wait_for(lambda: served.get("/debug/fleet")["workers"])

    assert clear_text.get(served.url + "/ready").status_code == 503
    assert served.get("/ready")["reason"].startswith("0 of 1 prefill workers")
    assert served.get("/live") == {"status": "ok"}
    p = prefill()
    loop_add(served, p)
    fleet = served.get("/debug/fleet")
    assert (fleet["transport"], fleet["keys"]) == (None, [])
    d.links_up = True
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 200)
    wait_for(lambda: served.get("/debug/fleet")["transport"] == "tcp")
    p.stop()
    wait_for(lambda: len(served.get("/debug/fleet")["workers"]) == 1)
    assert clear_text.get(served.url + "/ready").status_code == 200
    d.stop()
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 503)


def test_a_router_says_whether_it_needs_decode_workers(serve: Serve, prefill: Make) -> None:
    """As long as nobody is there it does, and where a model draws tokens: an alert asks for it."""
    served = serve(wait=False)
    wait_for(lambda: served.server.started)
    assert "tandem:router_needs_decode 1.0" in served.metrics()
    loop_add(served, prefill(pooling=ModelPooling()))
    wait_for(lambda: served.get("/debug/fleet")["workers"])
    assert "tandem:router_needs_decode 1.0" in served.metrics()


@pytest.mark.parametrize(
    ("pooling", "wanted"), [(ModelPooling(generates=False), 1), (ModelPooling(), 0)]
)
def test_prefill_workers_alone_are_a_fleet(
    serve: Serve, prefill: Make, pooling: ModelPooling, wanted: int
) -> None:
    """Where the model draws no tokens, or nobody is to decode; of a model that draws some they are
    none unless that is said."""
    p = prefill(pooling=pooling)
    served = serve(p, wait=False, ready_prefill=2, ready_decode=wanted)
    wait_for(lambda: served.server.started)
    wait_for(lambda: served.get("/debug/fleet")["workers"])
    assert served.get("/ready")["reason"].startswith("1 of 2 prefill workers are up")
    second = prefill(pooling=pooling)
    loop_add(served, second)
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 200)
    assert "tandem:router_needs_decode 0.0" in served.metrics()
    second.stop()
    wait_for(lambda: len(served.get("/debug/fleet")["workers"]) == 1)
    assert clear_text.get(served.url + "/ready").status_code == 200
    p.stop()
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 503)
    assert "up" in served.get("/ready")["reason"]


def test_prefill_workers_alone_are_not_ready_to_draw_tokens(serve: Serve, prefill: Make) -> None:
    """A chat would find nobody who decodes."""
    served = serve(prefill(pooling=ModelPooling()), wait=False)
    wait_for(lambda: served.server.started)
    wait_for(lambda: served.get("/debug/fleet")["workers"])
    assert served.get("/ready")["reason"] == "0 of 1 decode workers are up"


def health(served: Served) -> list[int]:
    pinged = served.post("/ping").status_code
    paths = ("/health", "/ping", "/live")
    return [clear_text.get(served.url + path).status_code for path in paths] + [pinged]


def test_health_waits_for_the_fleet_and_then_for_what_can_serve(
    serve: Serve, prefill: Make, decode: Make
) -> None:
    """503 with the reason until all of it was there once, and again when nobody is left."""
    d = decode(links_up=False)
    served = serve(d, wait=False, ready_prefill=1)
    served.wait_started()
    wait_for(lambda: served.get("/debug/fleet")["workers"])
    assert served.get("/health")["reason"].startswith("0 of 1 prefill workers")
    assert health(served) == [503, 503, 200, 503]
    p = prefill()
    loop_add(served, p)
    d.links_up = True
    wait_for(lambda: health(served) == [200] * 4)
    p.stop()
    wait_for(lambda: len(served.get("/debug/fleet")["workers"]) == 1)
    assert health(served) == [200] * 4
    d.stop()
    wait_for(lambda: health(served) == [503, 503, 200, 503])


def test_health_of_a_liveness_probe_waits_for_nobody(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods that are discovered would be killed by it."""
    monkeypatch.setattr(RouterConfig, "health_waits", property(lambda config: False))
    served = serve(wait=False)
    served.wait_started()
    assert health(served) == [200] * 4
    monkeypatch.undo()
    assert RouterConfig(model="m").health_waits
    assert not RouterConfig(model="m", discovery_selector="a=b", allow_plaintext=True).health_waits


def test_balancers_of_habit_get_their_answers(serve: Serve, decode: Make) -> None:
    """vLLM's /load and SGLang's /get_model_info and /flush_cache."""
    served = serve(decode(), enable_admin_api=True, served_model_name=("fake",))
    assert served.get("/load") == {"server_load": 0}
    told = served.get("/get_model_info")
    assert (told["model_path"], told["is_generation"]) == ("fake", True)
    assert served.post("/flush_cache").json()["ok"] is True
