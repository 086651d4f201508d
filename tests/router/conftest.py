"""What the router's tests share: workers that speak the protocol, and a stack over them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import tokenizers
from tests.router.builders import Stack
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tokenizers import decoders, models, pre_tokenizers

from tandem.protocol.card import WorkerRole


@pytest.fixture
def make_worker() -> Iterator[Callable[..., FakeWorker]]:
    """Start fake workers; all are stopped at the end of the test."""
    workers: list[FakeWorker] = []

    def make(role: WorkerRole, **settings: Any) -> FakeWorker:
        worker = FakeWorker(role, **settings)
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.stop()


@pytest.fixture
def prefill(make_worker: Callable[..., FakeWorker]) -> Callable[..., FakeWorker]:
    return lambda **settings: make_worker(WorkerRole.PREFILL, **settings)


@pytest.fixture
def decode(make_worker: Callable[..., FakeWorker]) -> Callable[..., FakeWorker]:
    return lambda **settings: make_worker(WorkerRole.DECODE, **settings)


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[Stack]:
    """A dispatcher with nothing to dispatch to yet: ``await stack.find(workers)``."""
    made = Stack()
    yield made
    await made.close()


@pytest_asyncio.fixture
async def alert_stack() -> AsyncIterator[Stack]:
    """One that takes half a second's silence for a worker's death, for tests that wait for it."""
    made = Stack(beat_timeout=0.5)
    yield made
    await made.close()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer of no merges: loaded at once, a token per byte."""
    folder = tmp_path_factory.mktemp("small-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<|end|>", *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    settings = {"eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def serve(
    small_model: Path, make_worker: Callable[..., FakeWorker]
) -> Iterator[Callable[..., Served]]:
    """Start an app over fake workers on a real uvicorn; all end with the test."""
    running: list[Served] = []

    def start(*workers: FakeWorker, **settings: Any) -> Served:
        served = Served(str(small_model), workers, **settings)
        running.append(served)
        return served

    yield start
    for served in running:
        served.stop()


@pytest.fixture(scope="module")
def well(smollm2: Path) -> Iterator[Served]:
    """An app over a prefill and a decode worker that behave; shared by a module's tests."""
    workers = [FakeWorker(WorkerRole.PREFILL), FakeWorker(WorkerRole.DECODE)]
    served = Served(str(smollm2), workers, enable_admin_api=True)
    yield served
    served.stop()
    for worker in workers:
        worker.stop()
