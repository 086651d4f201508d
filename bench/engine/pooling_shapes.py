"""Models to pool by, of which there are shapes alone, and their layers without an engine."""

from __future__ import annotations

import atexit
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import tokenizers
import torch
from rig import DUMMIES

from tandem.engine.config import EngineConfig, ModelFacts
from tandem.engine.worker.input_batch import batch_of
from tandem.engine.worker.step_rows import StepRows
from tandem.engine.worker.worker import Worker
from tandem.protocol.card import blocks_for

BERT_BASE: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
LARGE = {
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
}
XLM_ROBERTA_LARGE: dict[str, Any] = {
    **BERT_BASE,
    **LARGE,
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "vocab_size": 250002,
    "max_position_embeddings": 8194,
    "layer_norm_eps": 1e-5,
    "type_vocab_size": 1,
    "pad_token_id": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    **DUMMIES,
    "bert-base": BERT_BASE,
    "bert-large": {**BERT_BASE, **LARGE},
    "xlm-roberta-large": XLM_ROBERTA_LARGE,
}
"""By name; the last has the shapes of bge-m3."""


def dummy_folder(name: str) -> Path:
    """A folder of config.json and a tokenizer of two words, gone when the process ends."""
    folder = Path(mkdtemp(prefix="tandem-shapes-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    words = tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    return folder


def flops_a_token(facts: ModelFacts, tokens: int) -> float:
    """Operations of the layers for a token of a prompt of so many: products with weights, and
    attention (of a decoder half the pairs)."""
    hidden, inner = facts.hidden_size, facts.intermediate_size
    heads = facts.num_heads * facts.head_dim
    kv = 2 * facts.num_kv_heads * facts.head_dim
    mlp = (2 if facts.encoder is not None else 3) * hidden * inner
    seen = tokens if facts.encoder is not None else tokens / 2
    layer = 2 * (hidden * (2 * heads + kv) + mlp) + 4 * heads * seen
    return facts.num_layers * layer


@torch.inference_mode()
def layers_alone(worker: Worker, config: EngineConfig, prompts: Sequence[Sequence[int]]) -> None:
    """Compute ``prompts``, as many a step as an engine would and by its graphs, and wait for the
    last."""
    runner, device = worker.runner, worker._device
    stager = runner.stager
    whole = config.scheduler.max_num_batched_tokens // len(prompts[0])
    most = max(1, min(whole, config.scheduler.max_num_seqs))
    size, kept = config.cache.block_size, stager.batch
    batch = batch_of(config, most)
    batch.reserve(len(prompts[0]))
    stager.batch = batch
    try:
        for at in range(0, len(prompts), most):
            part = prompts[at : at + most]
            for row, prompt in enumerate(part):
                batch.table.assign(row, [[0] * blocks_for(len(prompt), size)] * batch.groups)
                batch.tokens[row, : len(prompt)] = prompt
            index, counts = np.arange(len(part)), np.array([len(prompt) for prompt in part])
            rows = StepRows(index, 0 * counts, counts, 0, int(counts.sum()))
            inputs = stager.stage(rows, None, index, runner.graphs.fit)
            if inputs.padded:
                runner.graphs.replay(inputs.shape)
            else:
                runner.hidden(inputs)
    finally:
        stager.batch = kept
    if device.type == "cuda":
        torch.cuda.synchronize(device)
