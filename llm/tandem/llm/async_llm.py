"""``AsyncLLM``: text in, a stream of text out, over any ``EngineCoreClient``.

The same object serves offline batches (engine in this process), one worker, and the router (its
dispatcher is a client). ``n`` choices are one request to the engine. Closing a stream, from a
client's disconnect or a cancelled task, aborts the request wherever it is.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from tandem.llm.beside import Beside
from tandem.llm.outputs import PooledRequestOutput, RequestOutput, rendered
from tandem.llm.prepared import PreparedRequest, Running
from tandem.llm.sampling import Params, defaults_of, params_from
from tandem.llm.sleep import put_to_sleep
from tandem.llm.texts import Texts
from tandem.llm.weighing import PROMPT_COSTS, chat_weight, params_weight, prompt_weight
from tandem.protocol.card import ModelCard
from tandem.protocol.client import EngineCoreClient
from tandem.protocol.commands import MAX_SLEEP_WAIT_S, Command, CommandName, Reply
from tandem.protocol.context import ORDINARY, RequestContext
from tandem.protocol.errors import (
    DeadlinePassed,
    FailCause,
    InvalidParameter,
    Refusal,
    RefusalCode,
    RequestFailed,
    RequestRefused,
)
from tandem.protocol.ids import Incarnation, RequestKey, new_incarnation
from tandem.protocol.outputs import Accepted, EngineCoreOutput, EngineOutput, PooledOutput
from tandem.protocol.pooling import PoolingParams
from tandem.protocol.sampling import SamplingParams
from tandem.text.chat_template import ChatOptions
from tandem.text.input_processor import InputOptions, InputProcessor, random_seed
from tandem.text.offsets import EchoedPrompt, echoed_prompt
from tandem.text.output_processor import OutputProcessor
from tandem.text.prompts import PromptLike
from tandem.text.tokenizer import Tokenizer

LOGPROBS_COST = 100
"""Of a prompt token with log-probabilities, in characters."""


class AsyncLLM(Texts):
    """One served model. All methods belong to one event loop."""

    def __init__(
        self,
        client: EngineCoreClient,
        tokenizer: Tokenizer,
        *,
        incarnation: Incarnation | None = None,
        beside: Beside | None = None,
        draw_seed: Callable[[], int] | None = random_seed,
        salt: Callable[[str | None], str | None] | None = None,
    ) -> None:
        """``incarnation`` stands in request keys: the router's own where it is a router, whose
        client has the same ``beside``. ``draw_seed`` gives the seeds of requests that bring none;
        None leaves that to the client. ``salt`` returns the cache salt of a request from the one
        that it asks for; without it, that one is used."""
        super().__init__(tokenizer, Beside() if beside is None else beside)
        self.num_outputs = 0
        """What the engine has said to all requests of ``stream``, shown to callers or not."""
        self._client = client
        self._incarnation = incarnation if incarnation is not None else new_incarnation()
        self._defaults = defaults_of(tokenizer.generation)
        self._default_max_tokens: int | None = self._defaults.pop("max_tokens", None)
        self._outputs = OutputProcessor(tokenizer)
        self._draw_seed = draw_seed
        self._salt = salt
        self._inputs: InputProcessor | None = None
        self._numbers = itertools.count()
        self._running = Running()

    async def card(self) -> ModelCard:
        """What is served. Raises RequestFailed when that is not known in time."""
        return await self._client.describe()

    async def prepare(
        self,
        prompt: PromptLike,
        params: Params = None,
        request_id: str | None = None,
        *,
        options: InputOptions | None = None,
    ) -> PreparedRequest:
        """Check and tokenize a prompt; nothing is sent. Raises InvalidParameter."""
        inputs, key = _generating(await self._input_processor()), self._next_key()
        filled = self._filled(options, params)
        return PreparedRequest(
            request_id=request_id if request_id is not None else key.request,
            processed=await self._tokenized(
                prompt_weight(prompt) + params_weight(params),
                lambda: inputs.process(prompt, self._params(params), key, filled),
            ),
        )

    async def check(
        self,
        prompt: PromptLike,
        params: Params = None,
        *,
        options: InputOptions | None = None,
        param: str = "prompt",
    ) -> None:
        """Raise what ``prepare`` would, as far as that takes less than to prepare the prompt: it is
        called by ``param``. See ``InputProcessor.check``."""
        inputs, filled = _generating(await self._input_processor()), self._filled(options, params)
        await self._tokenized(
            prompt_weight(prompt) + params_weight(params),
            lambda: inputs.check(prompt, self._params(params), filled, param=param),
        )

    async def prepare_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: Params = None,
        request_id: str | None = None,
        *,
        options: InputOptions | None = None,
        chat: ChatOptions | None = None,
    ) -> PreparedRequest:
        """Check, render and tokenize a chat; nothing is sent. Raises InvalidParameter."""
        inputs, key = _generating(await self._input_processor()), self._next_key()
        filled = self._filled(options, params)
        return PreparedRequest(
            request_id=request_id if request_id is not None else key.request,
            processed=await self._tokenized(
                chat_weight(messages, chat) + params_weight(params),
                lambda: inputs.process_chat(messages, self._params(params), key, filled, chat),
            ),
        )

    async def stream(
        self, prepared: PreparedRequest, context: RequestContext = ORDINARY
    ) -> AsyncGenerator[RequestOutput, None]:
        """Send the request and yield what comes, until every choice has ended. An output without
        choices, before all others, says that the request waits: if the context asks for that.

        Raises InvalidParameter for a ``request_id`` that is running, RequestRefused and
        RequestFailed as the client does, but for a deadline behind which the caller takes what
        there is. Closing it aborts the request.
        """
        self._running.take(prepared)
        state = self._outputs.begin(prepared.processed)
        if prepared.processed.partial_on_timeout:
            context = replace(context, takes_partial=True)
        params = prepared.processed.request.params
        if params.stop and params.n > 1:  # else whatever ends here ends with the stream
            context = replace(context, ended=state.ended)
        try:
            source = self._client.stream(prepared.processed.request, context)
            # The protocol promises aclose, which AsyncIterator does not have.
            closing = aclosing(cast("AsyncGenerator[EngineCoreOutput | Accepted, None]", source))
            async with closing as outputs:
                async for output in outputs:
                    if isinstance(output, Accepted):
                        yield rendered(prepared.request_id, prepared.processed, state, ())
                        continue
                    self.num_outputs += 1
                    if output.prompt_logprobs is None:
                        shown = state.feed(output)
                    else:
                        size = len(output.prompt_logprobs) * LOGPROBS_COST
                        shown = await self.beside.run(size, state.feed, output)
                    if state.finished:
                        # Whoever sees the last output may use the id again at once.
                        self._running.free(prepared)
                    if shown:
                        yield rendered(prepared.request_id, prepared.processed, state, shown)
                    if state.must_abort:
                        break
        except DeadlinePassed:
            shown = state.cut() if prepared.processed.partial_on_timeout else []
            if not shown:
                raise
            self._running.free(prepared)
            yield rendered(prepared.request_id, prepared.processed, state, shown)
        finally:
            self._running.free(prepared)
        if not state.finished:
            raise RequestFailed(FailCause.INTERNAL, "the engine ended a request without finishing")

    async def generate(
        self,
        prompt: PromptLike,
        params: Params = None,
        request_id: str | None = None,
        *,
        options: InputOptions | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """``prepare`` and ``stream`` in one; errors come with the first step."""
        prepared = await self.prepare(prompt, params, request_id, options=options)
        async with aclosing(self.stream(prepared)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: Params = None,
        request_id: str | None = None,
        *,
        options: InputOptions | None = None,
        chat: ChatOptions | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """``prepare_chat`` and ``stream`` in one; errors come with the first step."""
        prepared = await self.prepare_chat(messages, params, request_id, options=options, chat=chat)
        async with aclosing(self.stream(prepared)) as outputs:
            async for output in outputs:
                yield output

    async def prepare_pooling(
        self,
        prompt: PromptLike,
        params: PoolingParams | None = None,
        *,
        options: InputOptions | None = None,
        param: str = "prompt",
    ) -> PreparedRequest:
        """``prepare_all_pooling`` of one prompt."""
        one = await self.prepare_all_pooling([prompt], params, options=options, names=(param,))
        return one[0]

    async def prepare_all_pooling(
        self,
        prompts: Sequence[PromptLike],
        params: PoolingParams | None = None,
        *,
        options: InputOptions | None = None,
        names: Sequence[str] = (),
    ) -> list[PreparedRequest]:
        """Check and tokenize prompts that are pooled, all together; nothing is sent. Raises
        InvalidParameter that calls each by its one of ``names``, or "prompt", and RequestRefused
        where nobody pools."""
        inputs, wanted = await self._pooling(params)
        options = self._salted(options)
        keys = [self._next_key() for _ in prompts]
        processed = await self._tokenized(
            sum(map(prompt_weight, prompts)) + PROMPT_COSTS * len(prompts),
            lambda: inputs.process_all_pooling(prompts, wanted, keys, options, names=names),
        )
        return [
            PreparedRequest(request_id=key.request, processed=each)
            for key, each in zip(keys, processed, strict=True)
        ]

    async def check_pooling(
        self, prompts: Sequence[PromptLike], params: PoolingParams | None, names: Sequence[str]
    ) -> None:
        """Raise what ``prepare_all_pooling`` would, as far as that is known of ids and of nothing
        that has to be tokenized."""
        inputs, _ = await self._pooling(params)

        def check() -> None:
            for prompt, name in zip(prompts, names, strict=True):
                inputs.check_pooling(prompt, param=name)

        await self.beside.run(sum(map(prompt_weight, prompts)), check)

    async def pool(
        self, prepared: PreparedRequest, context: RequestContext = ORDINARY
    ) -> PooledRequestOutput:
        """What a prompt of ``prepare_pooling`` comes to, by the same queue and steps as tokens.

        Raises RequestRefused and RequestFailed as the client does; cancelling it aborts the
        request.
        """
        request = prepared.processed.request
        source = self._client.stream(request, context)
        async with aclosing(cast("AsyncGenerator[EngineOutput, None]", source)) as outputs:
            async for output in outputs:
                if isinstance(output, PooledOutput):
                    return PooledRequestOutput(
                        prompt_token_ids=request.prompt_token_ids,
                        values=output.values,
                        num_cached_tokens=output.num_cached_tokens,
                    )
        raise RequestFailed(FailCause.INTERNAL, "the engine gave no vector")

    async def echo(self, prepared: PreparedRequest) -> EchoedPrompt:
        """The prompt as it is shown before its answer, and where its tokens begin."""
        processed = prepared.processed
        ids = processed.request.prompt_token_ids
        return await self.beside.run(
            8 * len(ids), echoed_prompt, self.tokenizer, processed.prompt, ids
        )

    @property
    def num_running(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self._running)

    async def check_health(self) -> None:
        """Return if something is served; raises RequestFailed where nothing is."""
        await self._client.describe()

    async def reset_prefix_cache(self) -> Reply:
        """Drop cached blocks that no request holds."""
        return await self.call(CommandName.RESET_PREFIX_CACHE)

    async def sleep(
        self, level: int = 1, mode: str = "abort", timeout: float = MAX_SLEEP_WAIT_S
    ) -> Reply:
        """Have every engine give its memory back, or none: weights to host memory (``level`` 1) or
        dropped (2), all KV dropped. ``mode`` says what becomes of requests that run: "abort" ends
        them, "wait" gives them ``timeout`` seconds. Until ``wake_up``, requests are refused."""
        return await put_to_sleep(self.call, level=level, mode=mode, timeout=timeout)

    async def wake_up(self, tags: Sequence[str] | None = None) -> Reply:
        """Take memory again: "weights", "kv_cache", by default both, which requests need."""
        return await self.call(CommandName.WAKE_UP, tags=",".join(tags or ()))

    async def is_sleeping(self) -> bool:
        """Whether every engine sleeps, or has not taken all of its memory again."""
        values = (await self.call(CommandName.IS_SLEEPING)).values
        return values.get("asleep", 0) >= values.get("engines", 1)

    async def call(self, name: CommandName, **args: str | float | bool) -> Reply:
        """Run a command on the engine."""
        return await self._client.call(Command(id=next(self._numbers), name=name, args=args))

    async def close(self) -> None:
        """Abort what runs and close the client. May be called twice."""
        self.beside.close()
        await self._client.close()

    def _next_key(self) -> RequestKey:
        """A key of our own making: a client's id may repeat, this one never does."""
        return RequestKey(self._incarnation, f"r{next(self._numbers)}", 0)

    def _params(self, given: Params) -> SamplingParams:
        return params_from(given, self._defaults)

    def _filled(self, options: InputOptions | None, given: Params) -> InputOptions | None:
        """With the model's own max_tokens, which gives way where there is no room for so many."""
        options = self._salted(options)
        if self._default_max_tokens is None or isinstance(given, SamplingParams):
            return options
        return replace(options or InputOptions(), default_max_tokens=self._default_max_tokens)

    def _salted(self, options: InputOptions | None) -> InputOptions | None:
        """Return the request with the cache salt of its tenant."""
        if self._salt is None:
            return options
        options = options or InputOptions()
        return replace(options, cache_salt=self._salt(options.cache_salt))

    async def _pooling(self, params: PoolingParams | None) -> tuple[InputProcessor, PoolingParams]:
        """Who processes prompts that are pooled, and verified ``params``."""
        inputs = await self._input_processor()
        if inputs.card.pooling is None:
            message = "the workers are of a build that gives no vectors"
            raise RequestRefused(Refusal(code=RefusalCode.UNSUPPORTED, message=message))
        return inputs, inputs.card.pooling.check_task(params or PoolingParams())

    async def _input_processor(self) -> InputProcessor:
        """Of the model as it is served now; a fleet may change what that means."""
        card = await self._client.describe()
        if self._inputs is None or (self._inputs.card is not card and self._inputs.card != card):
            self._inputs = InputProcessor(self.tokenizer, card, draw_seed=self._draw_seed)
        return self._inputs


def _generating(inputs: InputProcessor) -> InputProcessor:
    pooling = inputs.card.pooling
    if pooling is not None and not pooling.generates:
        allowed = "a model with a head for tokens: this one gives vectors and scores"
        raise InvalidParameter("model", inputs.card.model, allowed)
    return inputs
