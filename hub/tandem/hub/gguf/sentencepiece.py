"""SentencePiece vocabulary with scores → the parts of a tokenizer.json, by BPE with merges.

SentencePiece merges the two neighbours whose joint token has the highest score. A list of merges in
the order of the scores of their results gives the same tokens.
"""

from typing import Any

from tandem.hub.gguf.reader import GgufModel
from tandem.hub.gguf.token_types import TokenType, token_types

KIND = "llama"
"""Value of ``tokenizer.ggml.model``."""
_SCORES = "tokenizer.ggml.scores"
_PREFIX = "tokenizer.ggml.add_space_prefix"
_SPACE = "▁"


def parts(model: GgufModel, tokens: list[str]) -> dict[str, Any]:
    """Return the normalizer, cut, decoder and model of tokenizer.json.

    Raises UnsupportedModel for a vocabulary that puts a space before texts.
    """
    if model.flag(_PREFIX, default=True):
        raise model.refusal(_PREFIX, model.get(_PREFIX, True), "false")
    unknown = model.token_id("unknown", len(tokens))
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": _merges(_normal_scores(model, tokens)),
        },
    }


def _normal_scores(model: GgufModel, tokens: list[str]) -> dict[str, float]:
    """Return the scores of tokens that plain text is merged to."""
    scores, kinds = model.require(_SCORES), token_types(model, len(tokens))
    numbers = isinstance(scores, list) and all(isinstance(each, float) for each in scores)
    if not numbers or len(scores) != len(tokens):
        allowed = f"one number for each of the {len(tokens)} tokens"
        raise model.refusal(_SCORES, scores, allowed)
    if not kinds:
        raise model.refusal("tokenizer.ggml.token_type", kinds, "a type for each token")
    return {
        token: score
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind == TokenType.NORMAL
    }


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    best_first = sorted(scores, key=scores.__getitem__, reverse=True)
    return [
        (token[:cut], token[cut:])
        for token in best_first
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
