"""Messages of gRPC that are written by hand are those that protobuf reads; long ones hold none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.rpc.raw_client import framed

from tandem.llm.outputs import CompletionOutput, RequestOutput
from tandem.protocol.finish import FinishReason
from tandem.router.rpc import inference
from tandem.router.rpc import tandem_pb2 as pb
from tandem.router.rpc.writing import StepWriter

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
CHOICES = st.builds(
    CompletionOutput,
    index=st.integers(0, 1000),
    text=TEXTS,
    token_ids=IDS.map(tuple),
    logprobs=st.none(),
    finish_reason=st.sampled_from([None, FinishReason.LENGTH]),
)


@given(request_id=TEXTS, choices=st.lists(CHOICES, max_size=4), finished=st.booleans())
def test_a_step_is_what_protobuf_would_write(
    request_id: str, choices: list[CompletionOutput], finished: bool
) -> None:
    """Byte for byte, whatever it says."""
    output = RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=(1, 2, 3),
        prompt_logprobs=None,
        outputs=tuple(choices),
        finished=finished,
        num_cached_tokens=2,
        num_generated_tokens=7,
    )
    wanted = pb.GenerateResponse(request_id=request_id)
    for choice in choices:
        told = wanted.choices.add(index=choice.index, text=choice.text, token_ids=choice.token_ids)
        if choice.finish_reason is not None:
            told.finish_reason = choice.finish_reason
    if finished:
        wanted.usage.CopyFrom(pb.Usage(prompt_tokens=3, completion_tokens=7, cached_tokens=2))
    said = StepWriter(request_id).step(output)

    assert pb.GenerateResponse.FromString(said) == wanted
    if request_id:
        assert said == wanted.SerializeToString()


def test_others_have_their_turns_between_vectors(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may have thousands of them."""
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        await asyncio.sleep(seconds)

    monkeypatch.setattr(inference, "asyncio", SimpleNamespace(sleep=nap))
    _, client = raw()
    client.greet()
    asked = pb.EmbedRequest(input=["a", "b", "c"]).SerializeToString()
    stream = client.ask(framed(asked), path="/tandem.v1.Inference/Embed")

    assert client.status(stream) == ("0", "")
    answer = pb.EmbedResponse.FromString(client.data(stream)[5:])
    assert [bool(each.values) for each in answer.data] == [True] * 3
    assert answer.usage.prompt_tokens
    assert naps == [0] * 3
