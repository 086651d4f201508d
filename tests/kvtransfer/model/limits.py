"""Which end of a hand-off takes token 1 for the last one: the running rules on a world's limits."""

from __future__ import annotations

from functools import lru_cache

from tests.kvtransfer.model.parts import D_ADDRESS, KEYS, P_ADDRESS, TOKEN, Setup

from tandem.engine.scheduler.admission import end_of
from tandem.protocol.outputs import finish_of
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce
from tandem.protocol.sampling import SamplingParams


def finish_at_p(setup: Setup) -> str | None:
    if setup.finish is None and _by_length(Produce(D_ADDRESS[0]), setup.p_len, setup):
        return "length"
    return setup.finish


def ends_at_d(setup: Setup) -> bool:
    """Whether D's own rule says that token 1 is the last one."""
    if setup.finish is not None and not setup.false_end:
        return True
    return _by_length(Consume(P_ADDRESS[0]), setup.d_len, setup)


@lru_cache
def _by_length(kv: Produce | Consume, own: int | None, setup: Setup) -> bool:
    if own is None:
        return False
    request = EngineCoreRequest(
        key=KEYS[0],
        prompt_token_ids=[0] * setup.num_blocks,
        params=SamplingParams(seed=0),
        max_model_len=setup.asked,
        kv=kv,
    )
    verdict = finish_of(
        request.params,
        (),
        TOKEN[0].token_id,
        num_emitted=1,
        num_prompt=setup.num_blocks,
        max_model_len=end_of(request, own),
    )
    return verdict is not None
