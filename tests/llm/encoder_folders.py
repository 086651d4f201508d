"""Folders of tiny encoders with a tokenizer of their own, as their authors save them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tests.engine_run.encoder_models import colbert_of, encoder_of, token_vectors_of
from tests.engine_run.tiny_models import temporary_folder
from tokenizers import models, normalizers, pre_tokenizers, processors

WORDS = [
    "the",
    "capital",
    "of",
    "france",
    "is",
    "paris",
    "a",
    "cat",
    "sat",
    "on",
    "mat",
    "berlin",
    "germany",
    "what",
    "where",
    "who",
]
TEXTS = ["the capital of France is Paris", "a cat sat on the mat", "Paris " * 60, "who", "qq zz"]
LETTERS = [chr(each) for each in range(ord("a"), ord("z") + 1)]


def _bert() -> tokenizers.Tokenizer:
    """WordPiece; a pair's second text is of type 1."""
    known = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *LETTERS,
        *(f"##{each}" for each in LETTERS),
        *WORDS,
    ]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(known))}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(each, vocabulary[each]) for each in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return made


def _roberta() -> tokenizers.Tokenizer:
    """Bytes without merges; pairs are joined by two separators, all of one type."""
    ends = ["<s>", "<pad>", "</s>", "<unk>"]
    known = [*ends, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {word: index for index, word in enumerate(known)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(ends)
    return made


@cache
def encoder_folder(
    name: str, *, pooling: str | None = None, normalize: bool = False
) -> tuple[Path, Any, Any]:
    """The encoder ``name`` with a tokenizer, transformers' model and tokenizer; ``pooling`` adds
    sentence-transformers' modules. Its positions hold 128 tokens."""
    source, model = encoder_of(name)
    folder, tokenizer = _with_tokenizer(source, _bert() if name.startswith("bert") else _roberta())
    if pooling is not None:
        _write_modules(folder, pooling, normalize=normalize)
    return folder, model, tokenizer


@cache
def colbert_folder() -> tuple[Path, Callable[[str], NDArray[np.float32]]]:
    """A ColBERT with a tokenizer, and what it makes of a text: a vector for each token."""
    source, body, layer = colbert_of()
    folder, tokenizer = _with_tokenizer(source, _bert())
    return folder, lambda text: token_vectors_of(body, layer, tokenizer(text)["input_ids"])


def _with_tokenizer(source: Path, made: tokenizers.Tokenizer) -> tuple[Path, Any]:
    import transformers

    folder = temporary_folder("tandem-text-")
    shutil.copytree(source, folder, dirs_exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder, transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json")
    )


def _write_modules(folder: Path, pooling: str, *, normalize: bool) -> None:
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if kind == "Transformer" else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{each}": each == pooling for each in ("cls_token", "mean_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
