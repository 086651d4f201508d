"""Files of sentence-transformers that say how texts are read: followed, refused or named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.config.read import read_facts
from tandem.protocol.errors import InvalidParameter

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 512,
}


def folder_of(path: Path, *, where: str = "", **files: Any) -> Path:
    """A folder with modules.json, and more files by their stems."""
    kind = "sentence_transformers.models."
    modules = [
        {"path": where, "type": f"{kind}Transformer"},
        {"path": "1_Pooling", "type": f"{kind}Pooling"},
    ]
    (path / "1_Pooling").mkdir()
    (path / where).mkdir(exist_ok=True)
    settings = {
        "config.json": BERT,
        "modules.json": modules,
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        **{f"{name}.json": content for name, content in files.items()},
    }
    for name, content in settings.items():
        (path / name).write_text(json.dumps(content))
    return path


def test_a_texts_length_bounds_the_context(tmp_path: Path):
    """The model was trained to see no more of a text."""
    folder = folder_of(tmp_path, sentence_bert_config={"max_seq_length": 256})
    assert read_facts(folder).derived_max_len == 256


@pytest.mark.parametrize("said", [{}, {"max_seq_length": None}, {"max_seq_length": 8192}])
def test_without_a_shorter_length_the_positions_bound_it(tmp_path: Path, said: dict[str, Any]):
    assert read_facts(folder_of(tmp_path, sentence_bert_config=said)).derived_max_len == 512


@pytest.mark.parametrize(("where", "name"), [("", "roberta"), ("0_Transformer", "bert")])
def test_the_settings_are_found_by_their_older_names(tmp_path: Path, where: str, name: str):
    stem = f"{where}/sentence_{name}_config" if where else f"sentence_{name}_config"
    folder = folder_of(tmp_path, where=where, **{stem: {"max_seq_length": 128}})
    assert read_facts(folder).derived_max_len == 128


@pytest.mark.parametrize("length", [0, -1, 1.5, "128", True])
def test_a_length_that_is_none_is_named(tmp_path: Path, length: Any):
    folder = folder_of(tmp_path, sentence_bert_config={"max_seq_length": length})
    with pytest.raises(InvalidParameter, match=r"sentence_bert_config\.json: max_seq_length"):
        read_facts(folder)


@pytest.mark.parametrize(
    ("normalizer", "taken"),
    [
        ({"type": "BertNormalizer", "lowercase": True}, True),
        ({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}, True),
        ({"type": "BertNormalizer", "lowercase": False}, False),
        (None, False),
    ],
)
def test_small_letters_are_those_of_the_tokenizer(tmp_path: Path, normalizer: Any, taken: bool):
    """A case that it does not make is refused by the key."""
    said = {"do_lower_case": True}
    folder = folder_of(tmp_path, sentence_bert_config=said, tokenizer={"normalizer": normalizer})
    if taken:
        read_facts(folder)
        return
    with pytest.raises(InvalidParameter, match="do_lower_case: True"):
        read_facts(folder)


@pytest.mark.parametrize(("name", "told"), [("query", True), ("document", False), (None, False)])
def test_a_prompt_before_each_text_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str | None, told: bool
):
    """Unless it is empty, or there is none by default."""
    said = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": name}
    with caplog.at_level(logging.WARNING):
        read_facts(folder_of(tmp_path, config_sentence_transformers=said))
    assert ("default_prompt_name 'query'" in caplog.text) is told
    assert ("'Find: '" in caplog.text) is told
