"""GGUF vocabulary → tokenizer.json and tokenizer_config.json.

Vocabularies are byte-level BPE or SentencePiece BPE. Files of the first only name their cut of text
(``tokenizer.ggml.pre``); the cuts are those of the models' published tokenizer.json.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tandem.hub.errors import UnsupportedModel
from tandem.hub.gguf import sentencepiece
from tandem.hub.gguf.reader import GgufModel
from tandem.hub.gguf.token_types import TokenType, token_types

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut of a text before merging."""

    pattern: str | None = None
    """Regular expression of the pieces; None is GPT-2's."""
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    """Whether a piece in the vocabulary is one token, regardless of merges."""
    begins: bool = False
    """Whether a text begins with bos if the file does not specify it."""


_LLAMA3_CUT = Cut(_LLAMA3, whole_words=True, begins=True)
CUTS = {
    "default": Cut(),
    "gpt-2": Cut(),
    "smollm": Cut(single_digits=True),
    "llama3": _LLAMA3_CUT,
    "llama-v3": _LLAMA3_CUT,
    "llama-bpe": _LLAMA3_CUT,
    "qwen2": Cut(_QWEN2, nfc=True),
    "deepseek-r1-qwen": Cut(_QWEN2, begins=True),
    "tekken": Cut(_TEKKEN, whole_words=True, begins=True),
}


def write_tokenizer(model: GgufModel, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises UnsupportedModel."""
    tokens = model.texts("tokenizer.ggml.tokens")
    parts, begins = _parts(model, tokens)
    begins = model.flag("tokenizer.ggml.add_bos_token", default=begins)
    ends = model.flag("tokenizer.ggml.add_eos_token", default=False)
    first = model.token_id("bos", len(tokens)) if begins else None
    last = model.token_id("eos", len(tokens)) if ends else None
    if ends and last is None:
        raise model.refusal("tokenizer.ggml.add_eos_token", ends, "false without eos_token_id")
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model, tokens),
        "post_processor": _around(tokens, first, last),
        **parts,
    }
    # Check that the library can read the file.
    try:
        made = Tokenizer.from_str(json.dumps(content))
    except Exception as error:
        raise UnsupportedModel(
            f"model: {model.path.name} has a vocabulary that is not BPE: {error}"
        ) from error
    made.save(str(folder / "tokenizer.json"), pretty=False)
    config = _tokenizer_config(model, tokens, begins=begins, ends=ends)
    _write_json(folder / "tokenizer_config.json", config)


def _parts(model: GgufModel, tokens: list[str]) -> tuple[dict[str, Any], bool]:
    """Return the normalizer, cut, decoder and model, and whether a text begins with bos if the file
    does not specify it."""
    kind = model.text("tokenizer.ggml.model")
    if kind == sentencepiece.KIND:
        return sentencepiece.parts(model, tokens), True
    if kind != "gpt2":
        raise UnsupportedModel(
            f"model: {model.path.name} has tokenizer.ggml.model {kind!r}; 'gpt2' (byte-level BPE) "
            f"and {sentencepiece.KIND!r} (SentencePiece BPE) are allowed"
        )
    cut = _cut(model)
    parts = {
        "normalizer": {"type": "NFC"} if cut.nfc else None,
        "pre_tokenizer": _pre_tokenizer(cut),
        "decoder": _byte_level(use_regex=True),
        "model": _bpe(model, tokens, cut),
    }
    return parts, cut.begins


def _cut(model: GgufModel) -> Cut:
    pre = model.text("tokenizer.ggml.pre", default="default")
    if pre not in CUTS:
        raise UnsupportedModel(
            f"model: {model.path.name} has tokenizer.ggml.pre {pre!r}; {sorted(CUTS)} are allowed"
        )
    return CUTS[pre]


def _added_tokens(model: GgufModel, tokens: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == TokenType.CONTROL,
        }
        for token_id, kind in enumerate(token_types(model, len(tokens)))
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]


def _pre_tokenizer(cut: Cut) -> Mapping[str, Any]:
    steps: list[Mapping[str, Any]] = []
    if cut.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if cut.pattern is not None:
        pattern = {"Regex": cut.pattern}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    steps.append(_byte_level(use_regex=cut.pattern is None))
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _around(tokens: list[str], first: int | None, last: int | None) -> dict[str, Any] | None:
    ids = dict.fromkeys(each for each in (first, last) if each is not None)
    if not ids:
        return None

    def part(sequence: str, type_id: int) -> list[dict[str, Any]]:
        def special(token_id: int | None) -> list[dict[str, Any]]:
            if token_id is None:
                return []
            return [{"SpecialToken": {"id": tokens[token_id], "type_id": type_id}}]

        text = {"Sequence": {"id": sequence, "type_id": type_id}}
        return [*special(first), text, *special(last)]

    return {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": [*part("A", 0), *part("B", 1)],
        "special_tokens": {
            tokens[each]: {"id": tokens[each], "ids": [each], "tokens": [tokens[each]]}
            for each in ids
        },
    }


def _bpe(model: GgufModel, tokens: list[str], cut: Cut) -> dict[str, Any]:
    merges = model.texts("tokenizer.ggml.merges")
    if wrong := next((each for each in merges if each.count(" ") != 1), None):
        raise model.refusal("tokenizer.ggml.merges", wrong, "two parts with a space between them")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": cut.whole_words,
        "vocab": {token: token_id for token_id, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in merges],
    }


def _tokenizer_config(
    model: GgufModel, tokens: list[str], *, begins: bool, ends: bool
) -> dict[str, Any]:
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: model.token_id(key, len(tokens)) for name, key in named.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.integer(model.own("context_length")),
        "add_bos_token": begins,
        **({"add_eos_token": True} if ends else {}),
        **{f"{name}_token": tokens[value] for name, value in ids.items() if value is not None},
    }
    if model.get("tokenizer.chat_template") is not None:
        config["chat_template"] = model.text("tokenizer.chat_template")
    return config


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
