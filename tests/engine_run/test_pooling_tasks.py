"""Scores by a classification head, vectors of tokens, and what a folder says of its pooling."""

import json
import shutil

import pytest
import torch
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.tiny_models import (
    MODELS,
    SHAPE,
    folder_of,
    judge_of,
    judged,
    temporary_folder,
)

from tandem.engine.config.pooling import pooling_of
from tandem.engine.config.read import read_facts
from tandem.protocol.errors import InvalidParameter, RefusalCode
from tandem.protocol.ids import RequestKey
from tandem.protocol.pooling import (
    MAX_TOKEN_VALUES,
    Activation,
    ModelPooling,
    PoolingParams,
    PoolingTask,
    PoolingType,
)
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

CLASSIFIERS = ("llama", "mistral", "qwen2", "qwen3")
PROMPTS = [[(7 * i + j * j) % 300 + 5 for j in range(n)] for i, n in enumerate((1, 5, 64, 100, 33))]
CLASSIFY = PoolingParams(task=PoolingTask.CLASSIFY)
TOKENS = PoolingParams(task=PoolingTask.TOKEN_EMBED)
IDENTITY = "torch.nn.modules.linear.Identity"
OLDER_KEY = "sbert_ce_default_activation_function"


def classifier(name, **said):
    """A folder with a random head of the family, and transformers' model of it."""
    import transformers

    family, differences = MODELS[name]
    torch.manual_seed(3)
    settings = {**SHAPE, "pad_token_id": 0, **differences, **said}
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    folder = temporary_folder(f"tandem-classifier-{name}-")
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_are_those_of_transformers_in_every_family(name):
    """Three labels by softmax and as the head gives them, side by side with vectors, in chunks."""
    folder, model = classifier(name, num_labels=3)
    engine = CPUEngine(folder, max_num_batched_tokens=40, max_num_seqs=6)
    assert read_facts(folder).pooling.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    raw = PoolingParams(task=PoolingTask.CLASSIFY, activation=False)
    asked = {}
    for prompt in PROMPTS:
        for params in (CLASSIFY, raw, PoolingParams()):
            asked[engine.pool(prompt, params).request] = (prompt, params)
    engine.run()
    for request, (prompt, params) in asked.items():
        with torch.inference_mode():
            scores = model(torch.tensor([prompt])).logits[0]
            states = model.model(torch.tensor([prompt])).last_hidden_state[0]
        got = torch.tensor(engine.pooled[request].vector)
        want = scores if params is raw else scores.softmax(-1)
        if params.task is PoolingTask.EMBED:
            want = states[-1] / states[-1].norm()
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    engine.core.check_integrity()


def test_a_classifier_draws_no_tokens():
    """It has no head for them, and says so."""
    folder, _ = classifier("qwen3", num_labels=1)
    engine = CPUEngine(folder)
    request = EngineCoreRequest(
        key=RequestKey(b"r" * 16, "a", 0), prompt_token_ids=[5], params=SamplingParams(seed=0)
    )
    refusal = engine.core.add(request)
    assert refusal is not None
    assert (refusal.code, refusal.param) == (RefusalCode.UNSUPPORTED, "model")
    key = engine.pool([5, 6, 7], CLASSIFY)
    engine.run()
    (score,) = engine.pooled[key.request].vector
    assert 0 < score < 1


@pytest.mark.parametrize(
    ("said", "activation"),
    [
        ({"num_labels": 1}, Activation.SIGMOID),
        ({"num_labels": 4}, Activation.SOFTMAX),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, Activation.SIGMOID),
        ({"num_labels": 1, "problem_type": "regression"}, Activation.IDENTITY),
        (
            {"sentence_transformers": {"activation_fn": IDENTITY}},
            Activation.IDENTITY,
        ),
        ({"num_labels": 1, OLDER_KEY: IDENTITY}, Activation.IDENTITY),
        (
            {
                "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
                OLDER_KEY: IDENTITY,
            },
            Activation.SIGMOID,
        ),
    ],
)
def test_what_makes_probabilities_is_as_config_json_says(said, activation):
    """By its own word, the kind of problem, or the number of labels."""
    folder, model = classifier("llama", **said)
    assert read_facts(folder).pooling.activation is activation
    engine = CPUEngine(folder)
    key = engine.pool(PROMPTS[1], CLASSIFY)
    engine.run()
    with torch.inference_mode():
        scores = model(torch.tensor([PROMPTS[1]])).logits[0]
    want = {Activation.SIGMOID: scores.sigmoid(), Activation.SOFTMAX: scores.softmax(-1)}
    got = torch.tensor(engine.pooled[key.request].vector)
    torch.testing.assert_close(got, want.get(activation, scores), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("key", ["activation_fn", OLDER_KEY])
def test_another_activation_is_refused_by_the_key_that_says_it(key):
    """The new key, or that of older cross-encoders."""
    said = {key: "torch.nn.modules.activation.Tanh"}
    config = {"num_labels": 1, **(said if key == OLDER_KEY else {"sentence_transformers": said})}
    with pytest.raises(InvalidParameter, match=rf"config\.json: {key}.*Tanh.*identity"):
        pooling_of(config, "BertForSequenceClassification")


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "llama-untied-biased"])
def test_vectors_of_tokens_and_of_prompts_in_every_family(name):
    """One vector a token, cut and normed or not, beside whole ones; chunks make no difference."""
    ways = [
        TOKENS,
        PoolingParams(task=PoolingTask.TOKEN_EMBED, normalize=False, dimensions=7),
        PoolingParams(pooling_type=PoolingType.MEAN),
        PoolingParams(),
    ]
    engines = [CPUEngine(folder_of(name), max_num_batched_tokens=n) for n in (24, 512)]
    for prompt in PROMPTS:
        with torch.inference_mode():
            states = judge_of(name).model(torch.tensor([prompt])).last_hidden_state[0]
        keys = [[engine.pool(prompt, params) for params in ways] for engine in engines]
        for engine, names in zip(engines, keys, strict=True):
            engine.run()
            got = [torch.tensor(engine.pooled[key.request].vector) for key in names]
            normed = states / states.norm(dim=1, keepdim=True)
            wants = [normed, states[:, :7], states.mean(0), states[-1]]
            wants[2:] = [each / each.norm() for each in wants[2:]]
            for vector, want in zip(got, wants, strict=True):
                torch.testing.assert_close(vector, want.flatten(), rtol=1e-3, atol=1e-3)
            assert not engine.executor.worker.runner.batch.poolers._chunks  # type: ignore[attr-defined]


def test_a_vector_alone_is_that_of_a_full_batch():
    """Twelve prompts of all kinds in one step, and each by itself."""
    folder, _ = classifier("qwen3", num_labels=3)
    kinds = [CLASSIFY, TOKENS, *(PoolingParams(pooling_type=each) for each in PoolingType)]
    asked = [(prompt, params) for prompt in PROMPTS[1:4] for params in kinds]
    whole, alone = (CPUEngine(folder, max_num_batched_tokens=2048) for _ in range(2))
    keys = [whole.pool(*each) for each in asked]
    whole.run()
    for key, each in zip(keys, asked, strict=True):
        one = alone.pool(*each)
        alone.run()
        assert whole.pooled[key.request].vector == pytest.approx(
            alone.pooled[one.request].vector, abs=1e-4
        )


def embedder(tmp_path, pooling, *types, name="qwen3"):
    """A sentence-transformers folder of a tiny model, its tensors without their prefix."""
    folder = tmp_path / "model"
    judge_of(name).model.save_pretrained(folder)
    shutil.copy(folder_of(name) / "config.json", folder)
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}", "type": f"st.models.{kind}"}
        for index, kind in enumerate(("Transformer", "Pooling", *types))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("pooling", "types", "said"),
    [
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
            (),
            (PoolingType.MEAN, False),
        ),
        (
            {"pooling_mode_lasttoken": True, "include_prompt": True},
            ("Normalize",),
            (PoolingType.LAST, True),
        ),
        ({"pooling_mode": "cls"}, ("Normalize",), (PoolingType.CLS, True)),
    ],
)
def test_sentence_transformers_files_are_followed(tmp_path, pooling, types, said):
    """Which states, and whether their length is made one; tensors may lack their prefix."""
    folder = embedder(tmp_path, pooling, *types)
    engine = CPUEngine(folder, max_num_batched_tokens=24)
    kind, normalize = said
    found = engine.core.card().pooling
    assert found is not None
    assert (found.pooling_type, found.normalize, found.generates) == (kind, normalize, False)
    key = engine.pool(PROMPTS[2], PoolingParams())
    engine.run()
    with torch.inference_mode():
        states = judge_of("qwen3").model(torch.tensor([PROMPTS[2]])).last_hidden_state[0]
    want = {PoolingType.MEAN: states.mean(0), PoolingType.CLS: states[0]}.get(kind, states[-1])
    want = want / want.norm() if normalize else want
    got = torch.tensor(engine.pooled[key.request].vector)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("pooling", "types", "named"),
    [
        ({"pooling_mode": "mean"}, ("Dense",), "modules.json: type"),
        ({"pooling_mode": "weightedmean"}, (), "pooling_mode"),
        ({"pooling_mode_max_tokens": True}, (), "pooling_mode"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, (), "pooling_mode"),
    ],
)
def test_modules_that_are_not_computed_stop_the_start(tmp_path, pooling, types, named):
    """Vectors would be others than the model's."""
    with pytest.raises(InvalidParameter, match=named):
        read_facts(embedder(tmp_path, pooling, *types))


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
@pytest.mark.parametrize("false_token", [7, None])
def test_yes_and_no_of_a_model_of_tokens_are_a_label(tmp_path, name, false_token):
    """The difference of two logits of the last token, or one logit; tokens are drawn as ever."""
    folder = tmp_path / "model"
    shutil.copytree(folder_of(name), folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "st.base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_LogitScore", "type": "st.modules.LogitScore"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    said = {"true_token_id": 9, "false_token_id": false_token}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(said))
    engine = CPUEngine(folder, max_num_batched_tokens=24)
    raw = PoolingParams(task=PoolingTask.CLASSIFY, activation=False)
    keys = [engine.pool(PROMPTS[2], params) for params in (CLASSIFY, raw)]
    drawn = engine.add(PROMPTS[2], 4)
    made = engine.run()
    with torch.inference_mode():
        logits = judge_of(name)(torch.tensor([PROMPTS[2]])).logits[0, -1]
    score = logits[9] - (0 if false_token is None else logits[false_token])
    got = [engine.pooled[key.request].vector for key in keys]
    assert got == [
        [pytest.approx(float(score.sigmoid()), abs=1e-3)],
        [pytest.approx(float(score), 1e-3)],
    ]
    assert made[drawn.request] == judged(name, PROMPTS[2], 4)[0]

    wrong = {"true_token_id": 320, "false_token_id": None}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(InvalidParameter, match="true_token_id"):
        read_facts(folder)
    own = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(said))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    assert read_facts(folder).pooling.activation is Activation.IDENTITY


def test_answers_have_a_bound_and_named_dimensions_are_the_only_ones():
    """16 MiB of one answer; matryoshka_dimensions of config.json."""
    plain, named = ModelPooling(), ModelPooling(dimensions=(64, 128))
    most = MAX_TOKEN_VALUES // 256
    assert plain.resolve(TOKENS, hidden_size=256, num_tokens=most).dimensions == 256
    with pytest.raises(InvalidParameter, match=f"at most {most} for vectors of 256"):
        plain.resolve(TOKENS, hidden_size=256, num_tokens=most + 1)
    with pytest.raises(InvalidParameter, match="one of 64, 128"):
        named.resolve(PoolingParams(dimensions=32), hidden_size=256, num_tokens=1)
    cut = named.resolve(PoolingParams(dimensions=64), hidden_size=256, num_tokens=1)
    assert cut.dimensions == 64
