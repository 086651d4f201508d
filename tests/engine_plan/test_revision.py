"""What makes a folder another revision: workers of different ones never exchange KV."""

from __future__ import annotations

import json

from tests.engine_plan.test_config import config_of


def test_revision_follows_the_weights(tmp_path):
    """Another weight byte, config or dummy seed is another revision; a given one is kept."""
    config = config_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    first = config.revision
    (tmp_path / "model.safetensors").write_bytes(bytes(99) + b"1")
    second = config.revision
    dummies = {config.with_(load_format="dummy", seed=seed).revision for seed in (0, 1)}

    assert len({first, second, *dummies}) == 4
    assert config.with_(revision="abc").fingerprint().revision == "abc"
    assert config.with_(block_size=32).fingerprint() != config.fingerprint()


def test_a_revision_is_of_the_weights_that_are_loaded(tmp_path):
    """The same weights once more, in a form that nobody loads, are no part of it."""
    config = config_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"1" * 100)
    alone = config.revision
    (tmp_path / "consolidated.safetensors").write_bytes(b"2" * 100)
    assert config.revision == alone

    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    )
    (tmp_path / "one.safetensors").write_bytes(b"3" * 100)
    (tmp_path / "two.safetensors").write_bytes(b"4" * 100)
    indexed = config.revision
    assert indexed != alone
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "consolidated.safetensors").unlink()
    assert config.revision == indexed
    (tmp_path / "two.safetensors").write_bytes(b"5" * 100)
    assert config.revision != indexed


def test_a_broken_index_is_the_loaders_to_tell(tmp_path):
    """A revision is asked for before weights are: it raises nothing about them."""
    config = config_of(tmp_path)
    for broken in ("{", "[]", '{"weight_map": {"a": "../b.safetensors"}}'):
        (tmp_path / "model.safetensors.index.json").write_text(broken)
        assert len(config.revision) == 32
