"""What is computed once for each worker decides as what is computed for each way does."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.router.builders import inc, view
from tests.router.placement.reference import Reference

from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.router.placement.damage import Targets
from tandem.router.placement.elastic import ElasticPolicy
from tandem.router.placement.snapshot import (
    Arrivals,
    Exclusions,
    FleetSnapshot,
    LinkPace,
    PromptFacts,
    WorkerView,
)

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
TARGETS = Targets(0.3, 0.025)
DECODES = ((), ((1, 0.005),), ((1, 0.006), (50, 0.012), (100, 0.018)), ((4, 0.004), (256, 0.017)))
PROMPTS = ((), ((500, 0.0125), (2000, 0.046)), ((64, 0.0045), (512, 0.0113), (2048, 0.0445)))
BESIDE = ((), ((240, 0.002), (500, 0.006), (760, 0.0115)))
FIELDS: dict[str, tuple[Any, ...]] = {
    "fingerprint": ("f", "f", "f", "f", "g"),
    "max_model_len": (40_000, 40_000, 8_000),
    "max_num_seqs": (256, 64),
    "max_handoff_tokens": (None, None, 4_000),
    "num_running": (0, 10, 100, 300),
    "num_waiting": (0, 1, 7),
    "waiting_tokens": (0, 0, 300, 2_048, 20_000),
    "loading_tokens": (0, 0, 300, 15_000),
    "num_decoding": (0, 0, 1, 10, 60),
    "context_tokens": (0, 5_000, 200_000),
    "decode_steps": DECODES,
    "context_s": (0.0, 4.5e-8, 5e-8),
    "prompt_steps": PROMPTS,
    "beside_steps": BESIDE,
    "steepness": (0.0, 4.2e-5),
    "chunk_tokens": (0, 512, 700, 2_048),
    "mixed_chunk_tokens": (0, 64, 350, 700),
    "bounds_steps": (False, True),
    "residence_s": (0.0, 0.1, 2.0, 3.7),
    "prompt_share": (0.0, 0.02, 0.5, 0.85, 1.1),
    "prompts_per_s": (0.0, 0.5, 18.0),
    "total_blocks": (0, 1_000, 20_000),
    "free_blocks": (0, 10, 900),
    "token_bytes": (70_000.0, 300_000.0),
    "free_share": (1.0, 0.5, 0.01),
    "num_legs": (0, 20),
    "num_streams": (0, 0, 15),
    "leg_tokens": (0, 0, 9_000),
    "leg_compute_tokens": (0, 0, 5_000),
    "leg_prompts": (0, 3),
    "draining": (False,) * 9 + (True,),
    "suspect": (False,) * 9 + (True,),
}
VIEWS = st.fixed_dictionaries({name: st.sampled_from(each) for name, each in FIELDS.items()})
PACES = st.builds(
    LinkPace,
    bytes_per_s=st.sampled_from((0.0, 1e9, 100e9)),
    waiting_bytes=st.sampled_from((0, 40_000_000, 2_000_000_000)),
    tail_s=st.sampled_from((None, 0.012, 0.04, 0.5)),
    probed_bytes_per_s=st.sampled_from((0.0, 50e9)),
    tail_spread_s=st.sampled_from((0.0, 0.01)),
)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[PromptFacts, FleetSnapshot, Exclusions]:
    """Up to four workers of each role, some of them alike, so that ways may cost the same."""
    kinds = draw(st.lists(VIEWS, min_size=1, max_size=4))
    many = st.sampled_from((0, 1, 2, 2, 3, 3, 4))
    roles = [P] * draw(many) + [D] * draw(many)
    workers = tuple(
        view(number, role, **draw(st.sampled_from(kinds))) for number, role in enumerate(roles)
    )
    paces = draw(st.lists(PACES, min_size=1, max_size=3))
    links, pulls = _links(draw, workers, P), _links(draw, workers, None)
    known = {each: draw(st.sampled_from(paces)) for each in sorted({*links, *pulls})}
    lacking = {each for each in known if draw(st.integers(0, 9)) == 0}
    known = {each: pace for each, pace in known.items() if each not in lacking}
    arrivals = Arrivals(*draw(st.sampled_from(((0.0, 0.0), (24.0, 50_000.0)))))
    fleet = FleetSnapshot(workers, frozenset(links), known, frozenset(pulls), arrivals)
    return _prompt(draw, workers), fleet, _exclusions(draw, workers)


def _links(
    draw: st.DrawFn, workers: tuple[WorkerView, ...], of: WorkerRole | None
) -> list[tuple[Incarnation, Incarnation]]:
    """Most of those from prefill to decode workers, or between any two."""
    pairs = [
        (one.incarnation, other.incarnation)
        for one in workers
        for other in workers
        if one is not other and (of is None or (one.role is of and other.role is not of))
    ]
    return [each for each in pairs if draw(st.integers(0, 5))]


def _prompt(draw: st.DrawFn, workers: tuple[WorkerView, ...]) -> PromptFacts:
    tokens = draw(st.sampled_from((1, 300, 2_048, 5_001, 12_000, 30_000)))
    shares = st.sampled_from((0.0, 0.0, 0.5, 0.97, 1.0))
    return PromptFacts(
        num_tokens=tokens,
        max_new_tokens=draw(st.sampled_from((None, 4, 256))),
        whole=draw(st.integers(0, 9)) == 0,
        hits={each.incarnation: int(tokens * draw(shares)) // 16 * 16 for each in workers},
    )


def _exclusions(draw: st.DrawFn, workers: tuple[WorkerView, ...]) -> Exclusions:
    """Mostly none."""
    if not workers or draw(st.integers(0, 3)):
        return Exclusions()
    one = frozenset([draw(st.sampled_from([each.incarnation for each in workers]))])
    pairs = frozenset([(inc(0), each) for each in one])
    return draw(
        st.sampled_from(
            (
                Exclusions(workers=one),
                Exclusions(prefill=one),
                Exclusions(pairs=pairs),
                Exclusions(no_handoff=True),
            )
        )
    )


# To shrink a fleet takes minutes, longer than a test may.
@settings(max_examples=150, deadline=None, phases=[each for each in Phase if each != Phase.shrink])
@given(
    scene=scenes(),
    least=st.sampled_from((0, 0, 300)),
    patience=st.sampled_from((0.0, 0.1, 10.0, math.inf)),
)
def test_a_way_comes_to_what_it_does_by_itself(
    scene: tuple[PromptFacts, FleetSnapshot, Exclusions], least: int, patience: float
) -> None:
    """To the last bit, in the same order, and so the same way is taken, of any fleet."""
    prompt, fleet, exclusions = scene
    policy = ElasticPolicy(least, patience, TARGETS)
    reference = Reference(least, patience, TARGETS)
    ways = reference.ways(prompt, fleet, exclusions)
    assert policy.forecasts(prompt, fleet, exclusions) == ways
    placement = policy.place(prompt, fleet, 0.0, exclusions)
    if not ways:
        assert placement is None or placement.forecast is None
        return
    assert placement is not None
    best, ordered = reference.choose(ways)
    assert placement.forecast == best
    assert (placement.worker, placement.prefill) == (best.worker, best.prefill)
    assert list(placement.considered) == ordered
