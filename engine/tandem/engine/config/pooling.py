"""Pooling of a model: config.json's head, and sentence-transformers' modules.

An unsupported module (a dense layer after pooling, weighted means) fails the start, as vectors
would differ.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tandem.engine.config.facts import EncoderFacts
from tandem.engine.config.weight_files import read_any, read_json
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.pooling import Activation, ModelPooling, PoolingType

logger = logging.getLogger(__name__)

MODULES = "modules.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"
_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of a transformer's own settings."""


def max_length_of(folder: Path) -> int | None:
    """Return the most tokens of a text by a folder of sentence-transformers, or None. Raises
    InvalidParameter for an unsupported case."""
    if not (folder / MODULES).is_file():
        return None
    found = next((path for path in _settings_of(folder) if path.is_file()), None)
    content = {} if found is None else read_json(found, needed=True)
    if content.get("do_lower_case") and not _lowers(folder):
        allowed = "false: the tokenizer keeps the case of texts"
        raise InvalidParameter(f"{found and found.name}: do_lower_case", True, allowed)
    _name_prompts(read_json(folder / SENTENCE_CONFIG, needed=False))
    length = content.get("max_seq_length")
    if length is None:
        return None
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        name = f"{found and found.name}: max_seq_length"
        raise InvalidParameter(name, length, "a positive integer")
    return length


def _settings_of(folder: Path) -> Iterator[Path]:
    modules = read_any(folder / MODULES)
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, dict) and str(module.get("type")).endswith(".Transformer"):
            for name in _CONFIGS:
                yield folder / str(module.get("path") or "") / name


def _lowers(folder: Path) -> bool:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return True  # unknown before the folder is complete
    normalizer = read_json(path, needed=True).get("normalizer")
    written = json.dumps(normalizer)
    return '"lowercase": true' in written or '"type": "Lowercase"' in written


def _name_prompts(content: Mapping[str, Any]) -> None:
    name, prompts = content.get("default_prompt_name"), content.get("prompts")
    prompt = prompts.get(name) if isinstance(prompts, dict) and name is not None else None
    if prompt:
        logger.warning(
            "%s: default_prompt_name %r is not followed; send its prompt %r before each text",
            SENTENCE_CONFIG,
            name,
            prompt,
        )


CLASSIFIER = "ForSequenceClassification"
BODY = "Model"

_TYPES = {
    "lasttoken": PoolingType.LAST,
    "mean": PoolingType.MEAN,
    "mean_tokens": PoolingType.MEAN,
    "cls": PoolingType.CLS,
    "cls_token": PoolingType.CLS,
}
"""sentence-transformers' names, in both spellings."""
_OLDER_ACTIVATION = "sbert_ce_default_activation_function"
"""Key of a cross-encoder's activation in sentence-transformers before 4."""
_NUM_LABELS = 2


def pooling_of(config: Mapping[str, Any], architecture: str) -> ModelPooling:
    """Return the pooling that config.json states. Raises InvalidParameter naming the key."""
    labels = _labels(config) if architecture.endswith(CLASSIFIER) else ()
    return ModelPooling(
        labels=labels,
        activation=_activation(config, len(labels)),
        generates=not architecture.endswith((CLASSIFIER, BODY)),
        dimensions=_dimensions(config),
    )


def of_encoder(pooling: ModelPooling, encoder: EncoderFacts) -> ModelPooling:
    """Return ``pooling`` for a model that pools the first token's state and draws no tokens."""
    return msgspec.structs.replace(
        pooling,
        pooling_type=PoolingType.CLS,
        classified=PoolingType.CLS,
        generates=False,
        has_token_types=encoder.num_token_types > 1,
        token_values=encoder.token_values,
    )


def with_modules(
    pooling: ModelPooling, folder: Path, *, tied: bool, vocab_size: int
) -> ModelPooling:
    """Return ``pooling`` with facts from sentence-transformers' files in ``folder``, if any.

    Without a ``tied`` head none is loaded. Raises InvalidParameter for unsupported modules.
    """
    path = folder / MODULES
    if not path.is_file():
        return pooling
    modules = read_any(path)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise InvalidParameter("model", str(path), "a list of objects")
    kind, normalize = None, False
    for module in modules:
        name = str(module.get("type")).rpartition(".")[2]
        if name == "Pooling":
            kind = _pooling_type(folder / str(module.get("path")) / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name == "LogitScore" and pooling.generates:
            pooling = _by_tokens(pooling, folder, str(module.get("path")), vocab_size)
        elif name != "Transformer":
            allowed = "Transformer, Pooling, Normalize and, after a head for tokens, LogitScore"
            raise InvalidParameter(f"{MODULES}: type", module.get("type"), allowed)
    if kind is None:
        return pooling
    generates = pooling.generates and tied
    return msgspec.structs.replace(
        pooling, pooling_type=kind, normalize=normalize, generates=generates
    )


def _by_tokens(pooling: ModelPooling, folder: Path, path: str, vocab_size: int) -> ModelPooling:
    config = read_json(folder / path / "config.json", needed=True)
    names = ("true_token_id", "false_token_id")
    tokens = [config.get(name) for name in names]
    if tokens[1] is None:
        del tokens[1]
    for name, token in zip(names, tokens, strict=False):
        if type(token) is not int or not 0 <= token < vocab_size:
            allowed = f"a token id from 0 to {vocab_size - 1}"
            raise InvalidParameter(f"{path}/config.json: {name}", token, allowed)
    own = read_json(folder / SENTENCE_CONFIG, needed=False)
    return msgspec.structs.replace(
        pooling,
        labels=("LABEL_0",),
        label_tokens=tuple(tokens),
        activation=_activation({"sentence_transformers": own}, 1),
    )


def _pooling_type(path: Path) -> PoolingType:
    config = read_json(path, needed=True)
    modes = config.get("pooling_mode")
    if modes is None:
        prefix = "pooling_mode_"
        modes = [key.removeprefix(prefix) for key, on in config.items() if on is True]
        modes = [mode for mode in modes if prefix + mode in config]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _TYPES:
        raise InvalidParameter(f"{path.parent.name}/{path.name}: pooling_mode", modes, _ALLOWED)
    return _TYPES[modes[0]]


_ALLOWED = f"one of {', '.join(_TYPES)}"


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        found = {str(key): str(name) for key, name in names.items()}
        if set(found) != {str(index) for index in range(len(found))}:
            raise InvalidParameter("config.json: id2label", names, "keys from 0 on")
        return tuple(found[str(index)] for index in range(len(found)))
    count = config.get("num_labels") or _NUM_LABELS
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidParameter("config.json: num_labels", count, "a positive integer")
    return tuple(f"LABEL_{index}" for index in range(count))


def _activation(config: Mapping[str, Any], num_labels: int) -> Activation:
    own = config.get("sentence_transformers")
    named = {
        "activation_fn": own.get("activation_fn") if isinstance(own, dict) else None,
        _OLDER_ACTIVATION: config.get(_OLDER_ACTIVATION),
    }
    for key, name in named.items():
        if not isinstance(name, str):
            continue
        word = name.rpartition(".")[2].lower()
        if word not in tuple(Activation):
            raise InvalidParameter(f"config.json: {key}", name, f"one of {', '.join(Activation)}")
        return Activation(word)
    problem = config.get("problem_type")
    if problem == "regression":
        return Activation.IDENTITY
    single = num_labels == 1 or problem == "multi_label_classification"
    return Activation.SIGMOID if single else Activation.SOFTMAX


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...]:
    found = config.get("matryoshka_dimensions")
    if found is None:
        return ()
    if not isinstance(found, list) or not all(type(each) is int and each > 0 for each in found):
        raise InvalidParameter("config.json: matryoshka_dimensions", found, "positive integers")
    return tuple(found)
