"""Logits processors of a package: found, asked for by requests, and in their place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine_run.cpu_engine import GREEDY, CPUEngine
from tests.engine_run.plugins import NAME, write_plugin
from tests.engine_run.tiny_models import folder_of

from tandem.engine import logits_processors
from tandem.engine.executor.multiproc import MultiprocExecutor
from tandem.engine.logits_processors import ProcessorClasses
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.ids import RequestKey
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

pytestmark = pytest.mark.full

PROMPTS = [[(11 * each + 7 * at) % 300 + 5 for at in range(25 + 9 * each)] for each in range(4)]
TOKEN = 42


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package on ``sys.path`` that offers two."""
    folder = write_plugin(tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    logits_processors.installed.cache_clear()
    yield folder
    sys.modules.pop(NAME, None)
    logits_processors.installed.cache_clear()


def asking(base: SamplingParams = GREEDY, **extra: object) -> SamplingParams:
    fields = {name: getattr(base, name) for name in base.__struct_fields__}
    return SamplingParams(**{**fields, "extra_args": extra})


def engine(**settings: object) -> CPUEngine:
    return CPUEngine(folder_of("llama"), num_gpu_blocks_override=40, **settings)  # type: ignore[arg-type]


def refused(engine: CPUEngine, params: SamplingParams) -> str:
    key = RequestKey(b"tests-of-plugins", "r", 0)
    request = EngineCoreRequest(key=key, prompt_token_ids=[5, 6], params=params)
    refusal = engine.core.add(request)
    assert refusal is not None
    return refusal.message


@pytest.mark.parametrize("executor", ["uni", "multiproc"])
def test_rows_that_ask_are_changed_and_no_others(plugin: Path, executor: str) -> None:
    plain = engine().generate(PROMPTS, 8)
    other = MultiprocExecutor() if executor == "multiproc" else None
    mixed = engine(executor=other)
    wanted = asking(only_token=TOKEN, only_times=3)
    keys = [mixed.add(p, 8, wanted if at % 2 else GREEDY) for at, p in enumerate(PROMPTS)]
    made = mixed.run()
    for at, key in enumerate(keys):
        tokens = made[key.request]
        if at % 2:
            assert tokens[:3] == [TOKEN] * 3
            assert TOKEN not in tokens[3:]
        else:
            assert tokens == plain[at]
    mixed.executor.stop()


def test_steps_do_not_run_ahead_of_one_that_looks_back(plugin: Path) -> None:
    wanted = asking(SamplingParams(seed=3), only_token=TOKEN, only_times=2)
    one = engine(async_scheduling=True).generate(PROMPTS, 8, wanted)
    assert one == engine(async_scheduling=False).generate(PROMPTS, 8, wanted)
    assert all(tokens[:2] == [TOKEN] * 2 and TOKEN not in tokens[2:] for tokens in one)


def test_what_keeps_the_best_token_does_not_touch_greedy_rows(plugin: Path) -> None:
    """They do not even call it; drawn ones become sharper, and as sharp as by their temperature."""
    greedy = engine().generate(PROMPTS, 8)
    assert engine().generate(PROMPTS, 8, asking(sharpness=0.01)) == greedy
    assert sys.modules[NAME].Sharp.calls == 0
    drawn = SamplingParams(seed=5, temperature=1.0)
    halved = SamplingParams(seed=5, temperature=0.5)
    assert engine().generate(PROMPTS, 8, asking(drawn, sharpness=2.0)) == engine().generate(
        PROMPTS, 8, halved
    )
    assert sys.modules[NAME].Sharp.calls > 0


def test_the_servers_own_rules_hold_whatever_one_does(plugin: Path) -> None:
    barred = SamplingParams(temperature=0.0, seed=0, allowed_token_ids=(7, 8))
    tokens = engine().generate(PROMPTS[:1], 6, asking(barred, only_token=TOKEN))[0]
    assert set(tokens) <= {7, 8}


def test_what_no_processor_knows_is_refused_by_name(plugin: Path) -> None:
    """With the names that there are; and values by the class itself."""
    mine = engine()
    assert "vllm_xargs.onyl_token: 1 is not allowed; one of only_times, only_token" in refused(
        mine, asking(onyl_token=1)
    )
    assert "vllm_xargs.only_token: -1 is not allowed; a token id" in refused(
        mine, asking(only_token=-1)
    )


def test_without_processors_every_name_is_refused() -> None:
    logits_processors.installed.cache_clear()
    assert "no logits processor is loaded" in refused(engine(), asking(x=1))


def test_classes_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a package's entry points; a name that is none is told."""
    monkeypatch.syspath_prepend(str(write_plugin(tmp_path, entry_points=False)))
    logits_processors.installed.cache_clear()
    names = (f"{NAME}:Only",)
    tokens = engine(logits_processors=names).generate(PROMPTS[:1], 4, asking(only_token=TOKEN))
    assert tokens == [[TOKEN] * 4]
    for wrong in (NAME, f"{NAME}:Nothing", "no_such_module:X", "json:JSONDecoder"):
        with pytest.raises(InvalidParameter, match="logits_processors"):
            ProcessorClasses((wrong,))
    with pytest.raises(InvalidParameter, match="names of their own"):
        ProcessorClasses((*names, f"{NAME}:Twin"))
    sys.modules.pop(NAME, None)


def test_a_package_that_cannot_be_loaded_is_named(plugin: Path) -> None:
    (offers,) = plugin.glob("*.dist-info/entry_points.txt")
    offers.write_text(f"[tandem.logits_processors]\nonly = {NAME}:Gone\n")
    with pytest.raises(InvalidParameter, match=f"tandem.logits_processors.*{NAME}:Gone"):
        ProcessorClasses(())


def test_bounds_of_what_is_said_to_processors() -> None:
    for wrong in ({str(n): 1 for n in range(65)}, {"a" * 129: 1}, {"a": "b" * 4097}):
        with pytest.raises(InvalidParameter, match="vllm_xargs"):
            asking(**wrong).verify()
    for value in (float("nan"), [1] * 1025, [float("inf")], {"a": 1}, None):
        with pytest.raises(InvalidParameter, match=r"vllm_xargs\.a"):
            asking(a=value).verify()
    asking(a=[1, "b", 2.5]).verify()


def test_emitted_tokens_are_not_drawn_again_under_a_processor(plugin: Path) -> None:
    """It knows the tokens before one position: a resumed request goes on without a comparison."""
    wanted = asking(only_token=TOKEN, only_times=3)
    whole = engine().generate([PROMPTS[0]], 8, wanted)[0]
    made, told = engine(), {"extra_args": wanted.extra_args, "max_tokens": 8, "ignore_eos": True}
    request = EngineCoreRequest(
        key=RequestKey(b"tests-of-plugins", "r", 0),
        prompt_token_ids=PROMPTS[0],
        params=SamplingParams(temperature=0.0, seed=0, **told),  # type: ignore[arg-type]
        emitted=(tuple(whole[:2]),),
    )
    assert made.core.add(request) is None
    tokens: list[int] = []
    while made.core.has_work:
        for outputs in made.core.advance().outputs.values():
            tokens += [token for each in outputs for token in each.token_ids]  # type: ignore[union-attr]
    assert tokens == whole[2:]
    assert made.core.scheduler.take_stats().replayed_tokens == 0
