"""A client that replays what an engine said, and a small tokenizer to say it in."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tandem.protocol.card import Fingerprint, KVGroup, KVLayout, ModelCard
from tandem.protocol.commands import Command, Reply
from tandem.protocol.context import ORDINARY, RequestContext
from tandem.protocol.outputs import EngineCoreOutput, FinishReason
from tandem.protocol.requests import EngineCoreRequest
from tandem.text.folder import TokenizerSettings
from tandem.text.tokenizer import Tokenizer

Script = Callable[[EngineCoreRequest], Sequence[EngineCoreOutput | Exception]]
"""What the engine says to a request, in order; an exception ends it."""


class ReplayClient:
    """An EngineCoreClient whose engine says what ``script`` says, then ends the stream."""

    def __init__(self, script: Script, card: ModelCard, *, hangs: bool = False) -> None:
        self.script = script
        self.card = card
        self.hangs = hangs
        """Whether the engine falls silent after its script, instead of ending."""
        self.asked = asyncio.Event()
        self.ended = threading.Event()
        self.requests: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.contexts: list[RequestContext] = []
        self.commands: list[Command] = []
        self.closed = 0

    async def stream(
        self, request: EngineCoreRequest, context: RequestContext = ORDINARY
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        self.contexts.append(context)
        self.requests.append(request)
        self.asked.set()
        ended = False
        try:
            for said in self.script(request):
                await asyncio.sleep(0)
                if isinstance(said, Exception):
                    raise said
                yield said
            if self.hangs:
                await asyncio.Event().wait()
            ended = True
        finally:
            self.ended.set()
            if not ended:
                self.aborted.append(request.key.request)

    async def call(self, command: Command) -> Reply:
        self.commands.append(command)
        return Reply(id=command.id, ok=True)

    async def describe(self) -> ModelCard:
        return self.card

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token per byte, and an end token; asks for a temperature of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(
        backend,
        TokenizerSettings(
            named_tokens={"eos_token": "<end>"},
            chat_templates={"default": "{% for m in messages %}{{ m.content }}{% endfor %}!"},
            generation={"temperature": 0.25, "top_p": 7.0, "eos_token_id": 256},
        ),
    )


@pytest.fixture
def card() -> ModelCard:
    group = KVGroup(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
    return ModelCard(
        model="tiny",
        fingerprint=Fingerprint(revision="r0", dtype="float32", layout=KVLayout((group,))),
        max_model_len=40_000,
        block_size=16,
        num_blocks=32,
        vocab_size=257,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_logprobs=5,
    )


@pytest.fixture
def says(tokenizer: Tokenizer) -> Callable[..., Script]:
    """Builds a script: each text, spelled a token a step, to every choice in turn."""

    def build(
        *texts: str, finish: FinishReason | None = FinishReason.LENGTH, chunk: int = 1
    ) -> Script:
        def script(request: EngineCoreRequest) -> list[EngineCoreOutput]:
            name, attempt = request.key.request, request.key.attempt
            said: list[tuple[int, EngineCoreOutput]] = []
            for choice, text in enumerate(texts):
                ids = tokenizer.encode(text)
                for start in range(0, len(ids), chunk):
                    last = start + chunk >= len(ids)
                    output = EngineCoreOutput(
                        name,
                        attempt,
                        choice,
                        start,
                        tuple(ids[start : start + chunk]),
                        finish=finish if last else None,
                        num_cached_tokens=16 if start == 0 else None,
                    )
                    said.append((start, output))
            return [output for _, output in sorted(said, key=lambda each: each[0])]

        return script

    return build


@pytest.fixture
def make_client(card: ModelCard) -> Callable[..., ReplayClient]:

    def make(script: Script, **options: bool) -> ReplayClient:
        return ReplayClient(script, card, **options)

    return make
