"""The host's microseconds for each prompt that is pooled, part by part, on a CPU.

    python bench/engine/pooling_host.py [--before TREE --prompts 512 --tokens 512 --rounds 7]

``LLM.embed`` of prompts as token ids and as texts, by a BERT-base of one layer which is left out:
in its place a step gets zeros for hidden states, so that all the time there is is the host's. All
else is as on a device: checks, schedule, inputs of steps, pooling, vectors of 768 values. What is
told is the processor time of the threads that run Python (waits count for nothing), the median of
the rounds, and prompts a second by the clock. ``--before`` is a tree of an earlier commit
(``git worktree add``): its rounds and this one's take turns, each by this script in a process of
its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve()
WORDS = 1000
CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "vocab_size": WORDS,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
RATE = "prompts a second"
PARTS = ("checks, ids, hashes", "add", "plan", "launch", "update", "observe")
THREADS = {"engine": "engine-core", "loop": "llm", "beside": "beside", "caller": "MainThread"}
"""What is told of each thread's other work, and the beginning of the thread's name."""

Costs = dict[str, float]
"""Microseconds a prompt, by part."""


def main() -> None:
    """Take turns and print, or make rounds for who asks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--before", type=Path, help="a tree of an earlier commit")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--whole", action="store_true", help="no parts: nothing is wrapped")
    parser.add_argument("--obey", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.obey:
        obey(args)
        return
    trees = {"now": HERE.parents[2]}
    if args.before is not None:
        trees = {"before": args.before.resolve(), **trees}
    sides = {name: start(tree, args) for name, tree in trees.items()}
    rounds: dict[str, list[dict[str, Costs]]] = {name: [] for name in sides}
    try:
        for number in range(args.rounds + 1):
            for name in sorted(sides, reverse=bool(number % 2)):
                told = ask(sides[name])
                if number:  # the first one warms
                    rounds[name].append(told)
    finally:
        for side in sides.values():
            assert side.stdin is not None
            side.stdin.close()
            side.wait(30)
    for kind in ("ids", "texts"):
        show(kind, {name: [each[kind] for each in told] for name, told in rounds.items()})


def show(kind: str, rounds: dict[str, list[Costs]]) -> None:
    """The round of each that took least, which others on the machine took away least from."""
    best = {name: min(told, key=lambda each: each["all"]) for name, told in rounds.items()}
    print(f"prompts as {kind}: us a prompt, {' and '.join(best)}")
    for part in dict.fromkeys(part for each in best.values() for part in each):
        values = [each.get(part, 0.0) for each in best.values()]
        print(f"  {part:34}", "".join(f"{value:10.1f}" for value in values), sep="")
    if "before" in best:
        pairs = zip(rounds["before"], rounds["now"], strict=True)
        ratios = [now["all"] / before["all"] for before, now in pairs]
        least, most = min(ratios), max(ratios)
        print(f"  now / before: {best['now']['all'] / best['before']['all']:.2f}", end="")
        print(f", of pairs {statistics.median(ratios):.2f} ({least:.2f} to {most:.2f})")


def start(tree: Path, args: argparse.Namespace) -> subprocess.Popen[str]:
    """One tree's engine, by this Python, which makes a round for each line."""
    portions = [str(each.parent) for each in tree.glob("*/tandem")]
    command = [sys.executable, str(HERE), "--obey"]
    command += [f"--prompts={args.prompts}", f"--tokens={args.tokens}"]
    command += ["--whole"] if args.whole else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(portions)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def ask(side: subprocess.Popen[str]) -> dict[str, Costs]:
    """A round."""
    assert side.stdin is not None
    assert side.stdout is not None
    side.stdin.write("\n")
    side.stdin.flush()
    told: dict[str, Costs] = json.loads(side.stdout.readline())
    return told


def obey(args: argparse.Namespace) -> None:
    """A line of JSON for each line that comes."""
    import tokenizers

    from tandem.engine.executor.uniproc import UniProcExecutor
    from tandem.llm import LLM

    words = {f"w{number:03}": number for number in range(WORDS - 1)} | {"w" * 16: WORDS - 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w000"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    draw = random.Random(0)
    ids = [[draw.randrange(WORDS - 1) for _ in range(args.tokens)] for _ in range(args.prompts)]
    texts = [" ".join(f"w{each:03}" for each in prompt) for prompt in ids]
    executor = UniProcExecutor()
    with TemporaryDirectory() as folder:
        config = {**CONFIG, "max_position_embeddings": args.tokens}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "executor": executor}
        options |= {"max_num_batched_tokens": 8192, "enable_prefix_caching": False}
        with LLM(folder, **options) as llm:
            told = parts_of(llm, executor, whole=args.whole)
            for _ in sys.stdin:
                kinds: dict[str, Any] = {"ids": ids, "texts": texts}
                found = {kind: of_round(llm, given, told) for kind, given in kinds.items()}
                print(json.dumps(found), flush=True)


def of_round(llm: Any, prompts: Any, told: Costs) -> Costs:
    """Microseconds a prompt of one call."""
    told.clear()
    steps = llm.engine._llm._client._core._steps
    before, started = clocks(), time.perf_counter()
    llm.embed(prompts)
    seconds = time.perf_counter() - started
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in clocks().items()}
    found = {part: told.get(part, 0.0) for part in PARTS}
    for name, thread in THREADS.items():
        found[f"{name}, the rest"] = spent.get(thread, 0.0) - told.get(thread, 0.0)
    found["all"] = sum(spent.values())
    steps = llm.engine._llm._client._core._steps - steps
    costs = {part: 1e6 * seconds / len(prompts) for part, seconds in found.items()}
    return {**costs, "steps": steps, RATE: len(prompts) / seconds}


def clocks() -> Costs:
    """Processor seconds of this process's Python threads, by name."""
    found: Costs = defaultdict(float)
    for each in threading.enumerate():
        if each.ident is not None:
            seconds = time.clock_gettime(time.pthread_getcpuclockid(each.ident))
            found[each.name.partition("_")[0]] += seconds
    return found


def parts_of(llm: Any, executor: Any, *, whole: bool) -> Costs:
    """Processor seconds of the parts, from now on."""
    from tandem.text.input_processor import InputProcessor

    told: Costs = defaultdict(float)
    runner, core = executor.worker.runner, llm.engine._llm._client._core
    type(runner).hidden = _no_layers
    if whole:
        return told
    each, all_of = "process_pooling", "process_all_pooling"
    prepare = all_of if hasattr(InputProcessor, all_of) else each
    parts = (
        (InputProcessor, prepare, "checks, ids, hashes"),
        (core, "add", "add"),
        (core.scheduler, "plan", "plan"),
        (executor, "execute", "launch"),
        (core, "_update", "update"),
        (core, "observe", "observe"),
    )
    for owner, name, part in parts:
        _measure(owner, name, told, part)
    return told


def _no_layers(_: Any, inputs: Any, *__: Any) -> Any:
    import torch

    return torch.zeros(len(inputs.logits_indices), CONFIG["hidden_size"])


def _measure(owner: Any, name: str, told: Costs, part: str) -> None:
    of: Callable[..., object] = getattr(owner, name)

    def measured(*args: object, **options: object) -> object:
        started = time.thread_time()
        try:
            return of(*args, **options)
        finally:
            spent = time.thread_time() - started
            told[part] += spent
            told[threading.current_thread().name.partition("_")[0]] += spent

    setattr(owner, name, measured)


if __name__ == "__main__":
    main()
