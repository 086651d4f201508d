"""Plans of a model with one group equal those that were recorded before there were groups."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.engine_plan.builders import Harness, params_of, request_of

from tandem.engine.step import SchedulerOutput

RECORDED = {
    0: "cea9634f4cb8a8826ca9834e9d0e36d9beb99684d536cd9208401f6fe618294b",
    1: "1fe5d0b3b4659789ca6185df7291a1e7613861d9db3ef6f61fffa1ea1028becd",
    2: "8e2177a8f2558d7462673e71e14e0c8d017147fd4bf4228b20f6b57359aa6ed0",
    3: "3dd5eab1409b5a6bffbd785bd71bf913684cf6069c1de8270fb1a64fa9878ebf",
    4: "89e65ce6a3a7b937f6fd5e6045445e40dd488e208cdcc95d44b5bb1abb4aa805",
    5: "57d16df2b01f8a4eba2188bef1a34a83849c525c14939fff5d9863dcb8e0b7c2",
    6: "ce875e025f1dfde86c6a6ee7d0746b2ebc581f5cbed18bf6a8e88d1e2bc8100f",
    7: "c121273eba41ec8a5da273a2b91b65b5d98d5ad64239cc3172b07d02632dca75",
    8: "7946b978025ffd50fb10f927696d4e1408e0ee9e68b82beb14193ce03d6c0368",
    9: "bb379866ee0a244d36d0b4e51fc09a6bc9b196716a9a0a75789dd46b3f1f0c79",
    10: "92eacf295f2970034937949429553da990a441eed9114374addb1444210e51cf",
    11: "23c9f58911627f9833034e92f1b7b020f2f7ffeeda0154f9ebbf23dfd16a60e8",
}
"""SHA-256 of the plans by seed, recorded at afe64191 by this file's ``plans``."""


def flat(tables: Any) -> list[int]:
    """Block ids without their groups: there is one."""
    return [
        each for table in tables for each in (table if isinstance(table, list | tuple) else [table])
    ]


def as_text(plan: SchedulerOutput) -> str:
    rows = [
        (r.seq, r.num_computed, r.num_scheduled_tokens, flat(r.new_block_ids), r.sample_choices)
        for r in plan.rows
    ]
    new = [(n.seq, n.token_ids, n.num_prompt, n.choice, flat(n.block_ids)) for n in plan.new]
    moved = (
        None
        if plan.transfers is None
        else (plan.transfers.stores, [b.blocks for b in plan.transfers.loads])
    )
    return repr((plan.step, rows, new, plan.dropped, plan.block_copies, moved))


def plans(seed: int) -> Iterator[str]:
    """Serve 40 requests that share prefixes, fork and preempt each other; yield each plan."""
    draw = random.Random(seed)
    harness = Harness(
        draw.choice((14, 20, 40)),
        max_num_batched_tokens=draw.choice((16, 64)),
        max_num_seqs=draw.choice((4, 16)),
        async_scheduling=draw.random() < 0.5,
        num_cpu_blocks=draw.choice((0, 6, 30)),
    )
    found: list[str] = []
    execute = harness.executor.execute

    def noted(plan: SchedulerOutput) -> Any:
        found.append(as_text(plan))
        return execute(plan)

    harness.executor.execute = noted  # type: ignore[method-assign]
    for number in range(40):
        prompt = [
            *range(draw.choice((0, 16, 40, 70))),
            *(draw.randrange(50) for _ in range(draw.randrange(1, 30))),
        ]
        params = params_of(
            n=draw.choice((1, 1, 1, 3)),
            temperature=1.0,
            seed=draw.randrange(9),
            max_tokens=draw.choice((1, 8, 40)),
        )
        harness.add(request_of(f"r{number}", prompt, params=params))
        for _ in range(draw.randrange(8)):
            harness.step()
    harness.run()
    yield from found


def digest(seed: int) -> str:
    hashed = hashlib.sha256()
    for each in plans(seed):
        hashed.update(each.encode())
    return hashed.hexdigest()


@pytest.mark.parametrize("seed", RECORDED)
def test_plans_with_one_group_are_those_before_groups(seed):
    assert digest(seed) == RECORDED[seed]


if __name__ == "__main__":
    print({seed: digest(seed) for seed in range(12)})
