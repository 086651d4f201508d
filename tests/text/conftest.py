"""Small tokenizers of the three families, trained in a moment, and the card of a small model."""

from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tandem.protocol.card import Fingerprint, KVGroup, KVLayout, ModelCard
from tandem.text.folder import TokenizerSettings
from tandem.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps. ",
    "The capital of France is Paris; naïve café crème, Ünïcödé. ",
    "emoji 😀 👩‍👩‍👧 and combining e\u0301 letters, 日本語 text.\n\nUser: hi\nAssistant: hello ",
] * 4
SPECIALS = ["<|start|>", "<|end|>", "<|pad me|>"]
SETTINGS = TokenizerSettings(
    named_tokens={"bos_token": "<|start|>", "eos_token": "<|end|>"},
    chat_templates={
        "default": "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] "
        "+ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    },
)


def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE, as Llama 3, Qwen and SmolLM2 have it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["plain added token", "é added"])
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """BPE over characters with byte fallback, as Llama 2 and Mistral have it."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted(set("▁" + "".join(CORPUS[:2]).replace(" ", "▁")))
    vocabulary = {token: index for index, token in enumerate(["<unk>", *SPECIALS, *fallback])}
    for letter in letters:
        vocabulary.setdefault(letter, len(vocabulary))
    merges = []
    for left, right in (("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "d"), ("▁d", "o")):
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIALS)
    return backend


def word_piece_backend() -> tokenizers.Tokenizer:
    """Word pieces, whose spaces depend on the neighbours: no table of bytes."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIALS], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A byte-level tokenizer with a ChatML-like template."""
    return Tokenizer(byte_level_backend(), SETTINGS)


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_backend(), SETTINGS)


@pytest.fixture(scope="session")
def word_piece() -> Tokenizer:
    """A tokenizer without a table of bytes."""
    return Tokenizer(word_piece_backend(), SETTINGS)


@pytest.fixture(scope="session")
def with_bos() -> Tokenizer:
    """The byte-level tokenizer again, putting its BOS before every text."""
    backend = byte_level_backend()
    start = backend.token_to_id("<|start|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", start)]
    )
    return Tokenizer(backend, SETTINGS)


@pytest.fixture
def make_card() -> Callable[..., ModelCard]:
    """Builds a card: context of 64 tokens, blocks of 4, unless told otherwise."""

    def make(**fields: object) -> ModelCard:
        layout = KVLayout(
            (KVGroup(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32"),)
        )
        values = {
            "model": "tiny",
            "fingerprint": Fingerprint(revision="r0", dtype="float32", layout=layout),
            "max_model_len": 64,
            "block_size": 4,
            "num_blocks": 32,
            "vocab_size": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_logprobs": 5,
        }
        return ModelCard(**(values | fields))  # type: ignore[arg-type]

    return make
