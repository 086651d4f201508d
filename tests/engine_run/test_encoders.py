"""Encoders through the scheduler of all, against transformers over the same folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine_run.cpu_engine import ROUTER, CPUEngine
from tests.engine_run.encoder_models import MODELS, POSITIONS, encoder_of, scores_of, states_of
from tests.engine_run.forked_rank import ForkedExecutor

from tandem.engine.config import EngineConfig
from tandem.engine.loader import LoadError
from tandem.protocol.errors import InvalidParameter, RefusalCode
from tandem.protocol.ids import RequestKey
from tandem.protocol.pooling import NO_SAMPLING, PoolingParams, PoolingTask, PoolingType
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

pytestmark = pytest.mark.full

LENGTHS = (1, 5, POSITIONS, 100, 33, 64, 2, 1)
PROMPTS = [[(7 * i + j * j) % 300 + 5 for j in range(n)] for i, n in enumerate(LENGTHS)]
KINDS = [
    PoolingParams(),
    PoolingParams(pooling_type=PoolingType.MEAN, normalize=False),
    PoolingParams(pooling_type=PoolingType.LAST, dimensions=20),
    PoolingParams(task=PoolingTask.TOKEN_EMBED),
]


def wanted(states: torch.Tensor, params: PoolingParams) -> torch.Tensor:
    """The values by transformers' hidden states [tokens, hidden]; the first token's unless asked
    for otherwise."""
    of = {PoolingType.MEAN: states.mean(0), PoolingType.LAST: states[-1]}
    vector = of.get(params.pooling_type, states[0])  # type: ignore[arg-type]
    vector = states if params.task is PoolingTask.TOKEN_EMBED else vector[: params.dimensions]
    return vector if params.normalize is False else vector / vector.norm(dim=-1, keepdim=True)


def values_of(engine: CPUEngine, key: RequestKey) -> torch.Tensor:
    return torch.tensor(engine.pooled[key.request].vector)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ahead", [False, True])
def test_vectors_are_those_of_transformers(name: str, ahead: bool) -> None:
    """Prompts from one token to all positions, several in a step, of every pooling at once."""
    folder, model = encoder_of(name)
    engine = CPUEngine(folder, max_num_batched_tokens=200, max_num_seqs=5, async_scheduling=ahead)
    asked = {}
    for index in range(2 * len(PROMPTS)):
        prompt = PROMPTS[index % len(PROMPTS)]
        params = KINDS[(index + index // len(PROMPTS)) % len(KINDS)]
        asked[engine.pool(prompt, params)] = (prompt, params)
    engine.run()
    for key, (prompt, params) in asked.items():
        want = wanted(states_of(model, prompt), params)
        got = values_of(engine, key).view(want.shape)
        assert (torch.cosine_similarity(got, want, -1) > 1 - 1e-5).all()
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    engine.core.check_integrity()
    assert engine.core.stats()["cached_blocks"] == 0
    assert engine.executor.worker.kv_cache_blocks().numel() == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name, each in MODELS.items() if "num_labels" in each[2]])
def test_classes_are_those_of_transformers(name: str) -> None:
    """Probabilities and the head's own numbers, of every length."""
    folder, model = encoder_of(name)
    engine = CPUEngine(folder, max_num_batched_tokens=200)
    raw = PoolingParams(task=PoolingTask.CLASSIFY, activation=False)
    asked = {engine.pool(prompt, raw): prompt for prompt in PROMPTS}
    shares = {engine.pool(p, PoolingParams(task=PoolingTask.CLASSIFY)): p for p in PROMPTS}
    engine.run()
    for key, prompt in asked.items():
        torch.testing.assert_close(
            values_of(engine, key), scores_of(model, prompt), rtol=1e-3, atol=1e-3
        )
    for key, prompt in shares.items():
        scores = scores_of(model, prompt)
        want = scores.sigmoid() if len(scores) == 1 else scores.softmax(0)
        torch.testing.assert_close(values_of(engine, key), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("multiproc", [False, True])
def test_tokens_of_a_second_text_are_of_its_type(multiproc: bool) -> None:
    """Pairs beside single texts in the same steps, also as bytes to a rank in another process."""
    folder, model = encoder_of("bert-pairs")
    executor = ForkedExecutor() if multiproc else None
    engine = CPUEngine(folder, executor=executor, max_num_batched_tokens=200)
    try:
        asked = {}
        for index, prompt in enumerate([*PROMPTS, *PROMPTS]):
            at = None if len(prompt) == 1 or index % 3 == 0 else len(prompt) // 2
            raw = PoolingParams(task=PoolingTask.CLASSIFY, activation=False, second_text_at=at)
            asked[engine.pool(prompt, raw)] = (prompt, at)
        engine.run()
        for key, (prompt, at) in asked.items():
            want = scores_of(model, prompt, at)
            torch.testing.assert_close(values_of(engine, key), want, rtol=1e-3, atol=1e-3)
    finally:
        engine.core.close()
    differs = scores_of(model, PROMPTS[3], 50) - scores_of(model, PROMPTS[3])
    assert differs.abs().max() > 1e-2


def test_prompts_are_computed_whole_in_their_order() -> None:
    """One that does not fit beside those before it waits for the next step, and so do those behind
    it; nobody is cut."""
    folder, _ = encoder_of("bert")
    engine = CPUEngine(folder, max_num_batched_tokens=130)
    plans = []
    execute = engine.executor.execute

    def noted(plan: Any) -> Any:
        plans.append([(row.num_computed, row.num_scheduled_tokens) for row in plan.rows])
        return execute(plan)

    engine.executor.execute = noted  # type: ignore[method-assign]
    for length in (100, 40, 5, 128, 1, 1):
        engine.pool([7] * length, PoolingParams())
    engine.run()
    assert plans == [[(0, 100)], [(0, 40), (0, 5)], [(0, 128), (0, 1), (0, 1)]]


def refused(engine: CPUEngine, length: int, **changes: Any) -> tuple[RefusalCode, str | None, str]:
    key = RequestKey(ROUTER, "a", 0)
    given = {"params": NO_SAMPLING, "pooling": PoolingParams(), **changes}
    refusal = engine.core.add(EngineCoreRequest(key=key, prompt_token_ids=[5] * length, **given))
    assert refusal is not None
    return refusal.code, refusal.param, refusal.message


def test_what_an_encoder_does_not_do_is_refused_by_name() -> None:
    """More tokens than positions or than a step has; tokens; types that are not there."""
    folder, _ = encoder_of("roberta")
    engine = CPUEngine(folder)
    code, param, message = refused(engine, POSITIONS + 1)
    assert (code, param) == (RefusalCode.NEVER_FITS, "prompt_token_ids")
    assert "129 tokens, at most 128" in message
    short = CPUEngine(folder, max_num_batched_tokens=64)
    assert short.core.max_model_len == 64
    assert "65 tokens, at most 64" in refused(short, 65)[2]
    code, param, message = refused(engine, 3, params=SamplingParams(seed=0), pooling=None)
    assert (code, param) == (RefusalCode.UNSUPPORTED, "model")
    pair = PoolingParams(second_text_at=2)
    assert refused(engine, 3, pooling=pair)[:2] == (RefusalCode.INVALID, "second_text_at")
    typed = CPUEngine(encoder_of("bert")[0])
    assert "within the prompt's 2 tokens" in refused(typed, 2, pooling=pair)[2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("long_prefill_token_threshold", 32),
        ("lone_prefill_token_threshold", 32),
        ("max_num_begun_tokens", 32),
        ("kv_cache_memory_bytes", 1 << 20),
        ("kv_offloading_size", 0.1),
        ("kv_cache_dtype", "bfloat16"),
        ("max_model_len", 100),
    ],
)
def test_settings_that_mean_nothing_to_an_encoder_are_refused(name: str, value: Any) -> None:
    folder, _ = encoder_of("bert")
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, name: value}
    with pytest.raises(InvalidParameter, match=f"{name}.*encoder"):
        EngineConfig.of(folder, device="cpu", **settings)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"hidden_act": "selu"}, "hidden_act"),
        ("bert", {"type_vocab_size": 0}, "type_vocab_size"),
        ("roberta", {"pad_token_id": 200}, "max_position_embeddings"),
        ("roberta", {"pad_token_id": -1}, "pad_token_id"),
    ],
)
def test_variants_that_are_not_computed_are_refused(
    name: str, change: dict[str, Any], match: str
) -> None:
    """Whatever would give other vectors than the model's."""
    from tandem.engine.config.families import check_servable
    from tandem.engine.config.read import facts_of

    _, model = encoder_of(name)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], **change}
    with pytest.raises(InvalidParameter, match=match):
        check_servable(facts_of(config))


def test_a_classifier_without_its_head_is_told() -> None:
    folder, _ = encoder_of("bert")
    labelled = EngineConfig.of(encoder_of("bert-labels")[0], device="cpu").facts
    with pytest.raises(LoadError, match=r"classifier\.weight"):
        CPUEngine(folder, facts=labelled)


def test_norms_under_their_older_names_are_found(tmp_path: Path) -> None:
    folder, model = encoder_of("bert-masked")
    shutil.copy(folder / "config.json", tmp_path)
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert any(name.endswith("gamma") for name in renamed)
    save_file(renamed, tmp_path / "model.safetensors")
    engine = CPUEngine(tmp_path)
    key = engine.pool(PROMPTS[4], PoolingParams())
    engine.run()
    want = wanted(states_of(model, PROMPTS[4]), PoolingParams())
    torch.testing.assert_close(values_of(engine, key), want, rtol=1e-3, atol=1e-3)
