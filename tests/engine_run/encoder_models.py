"""Small random encoders of every family, saved as transformers saves them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tests.engine_run.tiny_models import temporary_folder

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
ROBERTA = {"max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 1}
BERT = {"max_position_embeddings": 128, "pad_token_id": 0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", BERT),
    "bert-masked": ("BertForMaskedLM", "BertConfig", {**BERT, "hidden_act": "gelu_new"}),
    "bert-labels": ("BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 3}),
    "bert-pairs": ("BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 1}),
    "roberta": ("RobertaModel", "RobertaConfig", ROBERTA),
    "roberta-masked": ("RobertaForMaskedLM", "RobertaConfig", ROBERTA),
    "roberta-labels": (
        "RobertaForSequenceClassification",
        "RobertaConfig",
        {**ROBERTA, "num_labels": 3},
    ),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", ROBERTA),
    "xlm-roberta-pairs": (
        "XLMRobertaForSequenceClassification",
        "XLMRobertaConfig",
        {**ROBERTA, "num_labels": 1},
    ),
}
POSITIONS = 128
"""Tokens of the longest prompt of any of them."""


@cache
def encoder_of(name: str, **changes: Any) -> tuple[Path, Any]:
    """The saved model ``name`` and transformers' own, in float32; made once a run for ``changes``
    of its config. Biases and norms are random too."""
    import transformers

    model_class, config_class, differences = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    config = getattr(transformers, config_class)(**{**SHAPE, **differences, **changes})
    model = getattr(transformers, model_class)(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            gain = "LayerNorm.weight" in parameter_name
            torch.nn.init.normal_(parameter, 1.0 if gain else 0.0, 0.2)
    folder = temporary_folder(f"tandem-{name}-")
    model.save_pretrained(folder)
    return folder, model


def states_of(model: Any, ids: list[int], second_text_at: int | None = None) -> torch.Tensor:
    body = model if not hasattr(model, "base_model") else model.base_model
    with torch.inference_mode():
        found: torch.Tensor = body(**_given(ids, second_text_at)).last_hidden_state[0]
    return found


def scores_of(model: Any, ids: list[int], second_text_at: int | None = None) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(**_given(ids, second_text_at)).logits[0]
    return found


def _given(ids: list[int], second_text_at: int | None) -> dict[str, torch.Tensor]:
    types = torch.zeros(1, len(ids), dtype=torch.int64)
    if second_text_at is not None:
        types[0, second_text_at:] = 1
    return {"input_ids": torch.tensor([ids]), "token_type_ids": types}


@cache
def colbert_of(width: int = 16, *, named: bool = True) -> tuple[Path, Any, torch.Tensor]:
    """A saved ColBERT, transformers' BERT within it, and its layer [width, hidden], whose width its
    config.json may name."""
    _, body = encoder_of("bert")
    torch.manual_seed(width)
    layer = torch.randn(width, body.config.hidden_size) * 0.3
    folder = temporary_folder("tandem-colbert-")
    config = {**body.config.to_dict(), "architectures": ["HF_ColBERT"]}
    config |= {"dim": width} if named else {}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"bert.{name}": each.contiguous() for name, each in body.state_dict().items()}
    save_file({**tensors, "linear.weight": layer}, folder / "model.safetensors")
    return folder, body, layer


def token_vectors_of(body: Any, layer: torch.Tensor, ids: list[int]) -> NDArray[np.float32]:
    """What ColBERT makes of a prompt: [tokens, width], each of length one."""
    made = (states_of(body, ids) @ layer.T).numpy()
    lengths: NDArray[np.float32] = np.linalg.norm(made, axis=1, keepdims=True)
    unit: NDArray[np.float32] = np.divide(made, lengths, dtype=np.float32)
    return unit


def maxsim_of(query: NDArray[np.float32], document: NDArray[np.float32]) -> float:
    """Late interaction, plainly: each token of the query with its best of the document."""
    return float((query @ document.T).max(1).sum())
