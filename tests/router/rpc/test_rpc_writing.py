"""Messages of gRPC that answer a call."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.router.rpc.raw_client import SERVICE

from tandem.router.api.grpc import inference
from tandem.router.api.grpc import tandem_pb2 as pb


def test_others_have_their_turns_between_vectors(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may have thousands of them."""
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        await asyncio.sleep(seconds)

    monkeypatch.setattr(inference, "asyncio", SimpleNamespace(sleep=nap))
    _, client = raw()
    asked = pb.EmbedRequest(input=["a", "b", "c"]).SerializeToString()
    (message,) = client.start(asked, path=SERVICE + "Embed")
    answer = pb.EmbedResponse.FromString(message)
    assert [bool(each.values) for each in answer.data] == [True] * 3
    assert answer.usage.prompt_tokens
    assert naps == [0] * 3
