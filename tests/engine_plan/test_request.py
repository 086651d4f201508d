"""What a request knows of itself: counts, limits, hashes; and the queue that orders them."""

import ast
from pathlib import Path

from tests.engine_plan.builders import EOS, params_of, request_of

from tandem.engine import request as requests
from tandem.engine.request import Request, RequestGroup
from tandem.engine.scheduler.planner import choose_victim
from tandem.engine.scheduler.request_table import WaitingQueue
from tandem.engine.step import SeqId
from tandem.protocol.hashing import hash_blocks, root_hash
from tandem.protocol.ids import NO_INCARNATION
from tandem.protocol.outputs import TokenLogprobs
from tandem.protocol.requests import Produce

ROOT = root_hash(fingerprint="f", block_size=4)


def made(number: int, choices: tuple[int, ...] = (0,), priority: int = 0, **fields) -> Request:
    """The request that came as the ``number``-th."""
    source = request_of("q", 10, **fields)
    group = RequestGroup(
        source=source,
        root=ROOT,
        block_size=4,
        arrival=0.0,
        number=number,
        turn=0,
        deadline=5.0,
        max_model_len=100,
    )
    return Request(
        SeqId(number),
        group,
        choices,
        token_ids=[*source.prompt_token_ids, *source.emitted_of(choices[0])],
        num_prompt=10,
        order=(priority, 0, number, choices[0]),
        max_len=18,
        block_hashes=[],
    )


def test_counts_follow_the_tokens():
    """Known, pending, computed and output tokens are told apart."""
    request = made(1, emitted=((3, 4),))

    request.num_computed, request.num_output_placeholders = 12, 1

    assert (request.num_tokens, request.num_output, request.num_prefill) == (13, 2, 12)
    assert request.num_uncomputed == 1
    assert request.kv is None
    assert not request.finished
    assert "waiting" in repr(request)


def test_hashes_grow_with_the_tokens():
    """Hashes are extended when asked for, never beyond known full blocks, and chain as the
    protocol's do."""
    request = made(1)

    assert request.hashes_upto(1) == hash_blocks(ROOT, request.token_ids[:4], 4)
    assert request.hashes_upto(9) == hash_blocks(ROOT, request.token_ids, 4)
    request.token_ids += [1, 2]
    assert request.hashes_upto(9) == hash_blocks(ROOT, request.token_ids, 4)


def test_prompt_logprobs_keep_the_cache_away():
    """Positions whose logprobs are still missing are computed; those that were told are not."""
    request = made(1, params=params_of(prompt_logprobs=1))
    assert request.max_cached_tokens == 0

    assert request.prompt_logprobs is not None
    request.prompt_logprobs += [TokenLogprobs(1, -1.0, 1)] * 5
    assert request.max_cached_tokens == 5
    request.prompt_logprobs = None
    assert request.max_cached_tokens == 9


def test_told_prompt_logprobs_are_not_asked_for_again():
    """A resumed request's client has them already."""
    request = made(1, params=params_of(prompt_logprobs=1), emitted=((3,),))

    assert request.prompt_logprobs is None


def test_enders_are_what_may_stop_it():
    """End-of-sequence and stop ids, unless end-of-sequence is ignored."""
    assert made(1, params=params_of(stop_token_ids=(3,))).enders == {*EOS, 3}
    assert made(1, params=params_of(ignore_eos=True)).enders == set()


def test_producers_are_not_preempted_and_end_with_token_one():
    """A producer plans no second token, and neither does a prompt before its fork."""
    producer, forking = made(1, kv=Produce(NO_INCARNATION)), made(2, (0, 1))

    assert (producer.preemptible, producer.plan_limit) == (False, 11)
    assert (forking.preemptible, forking.plan_limit) == (True, 11)
    assert made(3).plan_limit == 18


def test_the_queue_is_ordered_and_forgets_what_left():
    """Priority, then arrival; a discarded request never comes up, a returned one takes its old
    place."""
    waiting = WaitingQueue()
    late, early, urgent, gone = made(3), made(1), made(4, priority=-1), made(2)
    for request in (late, early, urgent, gone):
        waiting.push(request)
    assert waiting.num_tokens == 40

    waiting.discard(gone)
    waiting.discard(gone)

    assert gone not in waiting
    assert [waiting.pop(), waiting.pop()] == [urgent, early]
    waiting.push(early)
    assert waiting.peek() is early
    assert [waiting.pop(), waiting.pop()] == [early, late]
    assert waiting.peek() is None
    assert (len(waiting), waiting.num_tokens) == (0, 0)


def test_the_last_preemptible_goes():
    """Blocks are taken from the one that goes last, never from a producer or from those before."""
    first, second, third = made(1), made(2), made(3)
    producer = made(4, kv=Produce(NO_INCARNATION))

    assert choose_victim([first, second, third], 0) == 2
    assert choose_victim([first, second, producer], 0) == 1
    assert choose_victim([first, producer], 0) == 0
    assert choose_victim([first, second], 1) == 1


OWNERS = {
    "block_tables": {"cache/manager.py"},
    "capacity": {"cache/manager.py"},
    "cache_due": {"cache/manager.py"},
    "num_cached_blocks": {"cache/manager.py"},
    "num_computed": {
        "scheduler/constrained.py",
        "scheduler/planner.py",
        "scheduler/remote.py",
        "scheduler/request_table.py",
        "scheduler/updater.py",
    },
    "num_generated": {"scheduler/updater.py"},
    "state": {"scheduler/request_table.py", "scheduler/remote.py"},
}


def written_in(file: Path) -> set[str]:
    """Names of the attributes that a file assigns to, its own objects' apart."""
    return {
        node.attr
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        and ast.unparse(node.value).split(".")[-1] not in ("group", "stats")
    }


def test_fields_are_written_by_their_owners_alone():
    """As the docstring of the module has it, over the whole plan."""
    plan = Path(requests.__file__).parent
    found: dict[str, set[str]] = {name: set() for name in OWNERS}
    for folder in ("cache", "core", "scheduler"):
        for file in (plan / folder).glob("*.py"):
            for name in written_in(file) & found.keys():
                found[name].add(f"{folder}/{file.name}")
    assert found == OWNERS
