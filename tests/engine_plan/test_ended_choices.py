"""Choices that a reader ends while others of their request go on."""

from __future__ import annotations

from contextlib import aclosing

import pytest
from tests.engine_plan.builders import ROUTER, Harness, params_of, request_of
from tests.engine_plan.pair import Pair, consume
from tests.engine_plan.sim import SimExecutor
from tests.engine_plan.test_client import client_of

from tandem.protocol.commands import Command, CommandName
from tandem.protocol.context import RequestContext
from tandem.protocol.ids import RequestKey

LONG = params_of(n=3, temperature=1.0, max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("ended", [(0,), (1, 2), (0, 2, 7)])
@pytest.mark.parametrize("overlap", [False, True])
def test_its_blocks_are_free_while_others_run(ended: tuple[int, ...], *, overlap: bool) -> None:
    """Whoever goes on says what it would have said; nothing more is said of the others."""
    harness = Harness(async_scheduling=overlap)
    request = request_of("a", 20, params=LONG)
    harness.add(request)
    while len(harness.tokens("a", 2)) < 40:
        harness.step()
    free, said = harness.core.stats()["free_blocks"], len(harness.outputs)
    harness.core.end_choices(request.key, ended)
    left = {0, 1, 2} - set(ended)
    assert harness.core.stats()["running"] == len(left)
    assert harness.core.stats()["free_blocks"] >= free + 2 * (3 - len(left))
    harness.run()
    assert {each.choice for each in harness.outputs[said:]} == left
    for choice in left:
        assert harness.tokens("a", choice) == harness.oracle(request, choice)[0]
    harness.check_empty()


def test_what_is_not_drawn_yet_ends_with_its_first_token() -> None:
    """Before a fork there is one sequence for all; those that are not here are nothing."""
    harness = Harness()
    request = request_of("a", 100, params=LONG)
    harness.add(request)
    harness.step()  # the prompt takes two
    harness.core.end_choices(request.key, (0, 1))
    harness.core.end_choices(RequestKey(ROUTER, "b", 0), (0,))
    harness.run()
    assert [len(harness.tokens("a", choice)) for choice in range(3)] == [1, 1, 60]
    harness.check_empty()


def test_all_of_them_are_the_request() -> None:
    """One after the other, as they may be found."""
    harness = Harness()
    request = request_of("a", 20, params=LONG)
    harness.add(request)
    harness.step()
    for choice in range(3):
        assert harness.core.holds(request.key)
        harness.core.end_choices(request.key, (choice,))
    assert not harness.core.holds(request.key)
    harness.run()
    harness.check_empty()


@pytest.mark.parametrize("loads", [False, True])
def test_one_that_is_handed_over_ends_when_its_kv_has_come(*, loads: bool) -> None:
    """Its end is in token 1, which P says while D waits for the KV."""
    pair = Pair()
    pair.prefill(params=LONG)
    request = pair.reserve(params=LONG) if loads else consume("a", params=LONG)
    if not loads:
        pair.d.add(request)
        pair.d.step()
    pair.d.core.end_choices(request.key, (0, 2))
    if not loads:
        pair.consumer.ready[request.key] = 40
        pair.d.step()
    pair.deliver(request)
    pair.d.run()
    assert [len(pair.d.tokens("a", choice)) for choice in range(3)] == [1, 60, 1]
    assert pair.d.tokens("a", 1) == pair.d.oracle(request, 1)[0]
    pair.check_empty()


async def test_an_engine_of_this_process_is_told() -> None:
    """Its stream ends with the choices that go on, and leaves nothing behind."""
    client = client_of(SimExecutor(64, verify=True))
    context, said = RequestContext(ended=[]), dict.fromkeys(range(3), 0)
    request = request_of("a", params=LONG)
    async with aclosing(client.stream(request, context)) as stream:
        async for output in stream:
            assert context.ended == []
            said[output.choice] += 1
            if output.choice != 1 and said[output.choice] == 1:
                context.ended.append(output.choice)
    assert said[1] == 60
    stats = (await client.call(Command(id=1, name=CommandName.STATS))).values
    assert (stats["running"], stats["free_blocks"]) == (0, 64)
    assert client._streams == {}
    await client.close()
