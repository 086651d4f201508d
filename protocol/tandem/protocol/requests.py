"""What the router sends to a worker to start one attempt at one request."""

import msgspec

from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.pooling import PoolingParams
from tandem.protocol.sampling import SamplingParams
from tandem.protocol.timeline import Watch


class Produce(msgspec.Struct, frozen=True, tag="produce"):
    """This worker prefills and hands its KV over; it emits token 1 and ends."""

    consumer: Incarnation
    """The decode worker that will ask for the KV; nobody else is answered."""


class Consume(msgspec.Struct, frozen=True, tag="consume"):
    """This worker takes the prompt's KV and token 1 from a prefill worker and goes on."""

    producer: Incarnation
    """The prefill worker to ask."""


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """A peer has more of the prompt cached than this worker: it is to be brought from there, and
    computed here only if that fails or takes longer."""

    holder: Incarnation
    """The worker to ask, of either role."""
    num_tokens: int
    """Tokens of the prompt's start that it has, as far as the router knows."""
    budget_ms: int
    """What computing them here is expected to take: past it, they are computed."""
    have: int = 0
    """Tokens of the prompt's start that the worker itself has, as far as the router knows."""


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt at one request, in tokens.

    ``prompt_token_ids`` and ``emitted`` travel apart: penalties, min and max tokens, usage,
    logprobs and the position of a draw all count from the end of the prompt.
    """

    key: RequestKey
    prompt_token_ids: list[int]
    """Of a prompt of embeddings a placeholder for each."""
    params: SamplingParams
    """With a seed; stop strings and bad words are ids by now or left to text/."""
    eos_token_ids: tuple[int, ...] = ()
    emitted: tuple[tuple[int, ...], ...] = ()
    """Per choice, tokens that a client may have seen: forced, never redrawn. () is none."""
    finished_choices: tuple[int, ...] = ()
    """Choices that ended in an earlier attempt and are not to be continued."""
    block_hashes: tuple[BlockHash, ...] = ()
    """Of the prompt's full blocks; empty lets the worker compute them."""
    cache_salt: str | None = None
    adapter: str | None = None
    priority: int = 0
    """Lower goes first under the priority policy."""
    tenant: str = ""
    """Tenant that it is computed for: tenants share an engine fairly. Empty if all are one."""
    budget_ms: int | None = None
    """What is left of the request's deadline when it was sent; None is no deadline."""
    max_model_len: int | None = None
    """Prompt and output tokens at which a choice ends by length, the same for both legs of a
    hand-off, whose workers may have other limits each; None is the worker's own."""
    kv: Produce | Consume | None = None
    """None: this worker does both halves."""
    pull: Pull | None = None
    """Whence the prompt's start may be brought, of who computes the prompt."""
    pooling: PoolingParams | None = None
    """A vector of the prompt is wanted and no token; ``params`` are then ``NO_SAMPLING``."""
    prompt_embeds: PromptEmbeds | None = None
    """What stands in place of the prompt's ids, one vector for each. Both legs of a hand-off get
    it: whoever goes on may have to compute the prompt again."""
    watch: Watch | None = None
    """Its times are kept and told with its end."""

    def emitted_of(self, choice: int) -> tuple[int, ...]:
        """Tokens of ``choice`` that earlier attempts emitted."""
        return self.emitted[choice] if choice < len(self.emitted) else ()
