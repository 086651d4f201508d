import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tandem.hub import prepare

Build = Callable[..., Path]


@pytest.fixture
def tokenizer(gguf_file: Build, tmp_path: Path) -> Callable[..., Tokenizer]:
    """Builds a GGUF file and loads the tokenizer that it becomes."""

    def build(family: str = "llama", **extra: object) -> Tokenizer:
        keys = {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
        folder = prepare(str(gguf_file(family, extra=keys)), cache_dir=tmp_path / "cache").path
        return Tokenizer.from_file(str(folder / "tokenizer.json"))

    return build


def test_merges_apply(tokenizer: Callable[..., Tokenizer]):
    """Pieces are merged as the file's merges say, and decode to the text again."""
    made = tokenizer()
    encoded = made.encode("ab a")
    assert encoded.tokens == ["ab", "Ġa"]
    assert made.decode(encoded.ids) == "ab a"


def test_control_and_user_tokens(tokenizer: Callable[..., Tokenizer]):
    """Both kinds are matched whole; only control tokens vanish when specials are skipped."""
    made = tokenizer()
    ids = made.encode("a<think>b<|end|>").ids
    assert ids == [2, 1, 3, 0]
    assert made.decode(ids, skip_special_tokens=True) == "a<think>b"


def test_smollm_cuts_digits(tokenizer: Callable[..., Tokenizer]):
    """Each digit stands alone, so the blanks before one stay together."""
    assert tokenizer().encode("  12").tokens == ["ĠĠ", "1", "2"]


def test_qwen_composes_unicode(tokenizer: Callable[..., Tokenizer]):
    """Qwen's text is brought to composed form first."""
    assert tokenizer("qwen2").normalizer is not None
    assert tokenizer("llama").normalizer is None


def test_begin_token_only_when_asked(tokenizer: Callable[..., Tokenizer]):
    """A text begins with bos where the file says so, or its kind does and it has one."""
    assert tokenizer().encode("a").ids == [2]
    assert tokenizer(add_bos_token=True, bos_token_id=0).encode("a").ids == [0, 2]
    assert tokenizer(pre="llama-bpe", bos_token_id=0).encode("a").ids == [0, 2]
    assert tokenizer(pre="llama-bpe", bos_token_id=0, add_bos_token=False).encode("a").ids == [2]


def test_llama3_takes_whole_words(tokenizer: Callable[..., Tokenizer]):
    """Llama 3's tokenizer prefers a word of its vocabulary to what merges would make of it."""
    model = json.loads(tokenizer(pre="llama-bpe").to_str())["model"]
    assert model["ignore_merges"] is True
    assert json.loads(tokenizer(pre="smollm").to_str())["model"]["ignore_merges"] is False


def test_chat_template_and_names(gguf_file: Build, tmp_path: Path):
    """tokenizer_config.json carries the template, the special tokens and the context length."""
    extra = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.padding_token_id": 4}
    folder = prepare(str(gguf_file(extra=extra)), cache_dir=tmp_path / "cache").path
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages }}"
    assert config["eos_token"] == "<|end|>"
    assert config["pad_token"] == "Ġ"
    assert config["model_max_length"] == 128
