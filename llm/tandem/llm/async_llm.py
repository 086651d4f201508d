"""``AsyncLLM``: text in, a stream of text out, over any ``EngineCoreClient``.

The same class serves offline batches (engine in this process), one worker, and the router (its
dispatcher is a client). ``n`` choices are one request to the engine. Closing a stream, after a
client's disconnect or a cancelled task, aborts the request in every process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import (
    Any,
    Protocol,
    TypeVar,
    cast,
)

from tandem.llm.cpu_pool import CpuPool
from tandem.llm.outputs import PooledRequestOutput, RequestOutput, rendered
from tandem.llm.sampling import (
    PROMPT_COSTS,
    Params,
    PreparedRequest,
    Running,
    chat_weight,
    defaults_of,
    params_from,
    params_weight,
    prompt_weight,
)
from tandem.protocol.card import ModelCard
from tandem.protocol.commands import (
    MAX_SLEEP_WAIT_S,
    Command,
    CommandName,
    Reply,
)
from tandem.protocol.context import ORDINARY, RequestContext
from tandem.protocol.errors import (
    DeadlinePassed,
    FailCause,
    InvalidParameter,
    Refusal,
    RefusalCode,
    RequestFailed,
    RequestRefused,
    TandemError,
)
from tandem.protocol.ids import Incarnation, RequestKey, new_incarnation
from tandem.protocol.outputs import (
    Accepted,
    EngineCoreOutput,
    EngineOutput,
    PooledOutput,
)
from tandem.protocol.pooling import PoolingParams
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams
from tandem.text.chat_template import ChatOptions
from tandem.text.input_processor import InputOptions, InputProcessor, random_seed
from tandem.text.output_processor import EchoedPrompt, OutputProcessor, echoed_prompt
from tandem.text.prompts import PromptLike
from tandem.text.tokenizer import Tokenizer
from tandem.tracing.recording import marked

POLL_SECONDS = 0.05
"""Interval of SLEEP commands while requests run."""
ABORT_SECONDS = 10.0
"""Deadline of aborted requests."""


class Call(Protocol):
    """Type of ``AsyncLLM.call``."""

    def __call__(self, name: CommandName, **args: str | float | bool) -> Awaitable[Reply]:
        """Run a command on every engine; values are summed."""
        ...


async def put_to_sleep(call: Call, *, level: int, mode: str, timeout: float) -> Reply:
    """Repeat the command until every engine sleeps.

    If one does not in time, all are woken up (unless some slept before), and the reply has the
    reason. Raises InvalidParameter for ``timeout``, RequestFailed for an engine that does not
    answer.
    """
    if not 0 <= timeout <= MAX_SLEEP_WAIT_S:
        raise InvalidParameter("timeout", timeout, f"seconds from 0 to {MAX_SLEEP_WAIT_S:g}")
    loop = asyncio.get_running_loop()
    seconds = timeout if mode == "wait" else ABORT_SECONDS
    until = loop.time() + seconds
    before = (await call(CommandName.IS_SLEEPING)).values.get("asleep", 0)
    try:
        while True:
            left = max(0.0, until - loop.time())
            lasting = min(left + ABORT_SECONDS, MAX_SLEEP_WAIT_S)
            reply = await call(CommandName.SLEEP, level=level, mode=mode, timeout_s=lasting)
            if not reply.ok:
                break
            if 0 < reply.values.get("engines", 0) <= reply.values.get("asleep", 0):
                return reply
            if not left:
                message = f"requests did not come to their end within {seconds:g} s"
                reply = Reply(id=reply.id, ok=False, message=message)
                break
            await asyncio.sleep(min(POLL_SECONDS, left))
    except (TandemError, asyncio.CancelledError):
        with suppress(TandemError):  # an engine that does not answer wakes up by itself
            await call(CommandName.WAKE_UP)
        raise
    if not before:
        await call(CommandName.WAKE_UP)
    return reply


_Result = TypeVar("_Result")


class Texts:
    """Tokenizer calls of one model, for one event loop."""

    def __init__(self, tokenizer: Tokenizer, cpu_pool: CpuPool) -> None:
        self.tokenizer = tokenizer
        self.cpu_pool = cpu_pool

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], chat: ChatOptions | None = None
    ) -> str:
        """Return the text of a chat. Raises InvalidParameter."""
        return await self.cpu_pool.run(
            chat_weight(messages, chat), self.tokenizer.render_chat, messages, chat
        )

    async def encode_pair(
        self,
        first: str,
        second: str,
        *,
        params: tuple[str, str],
        keep: int | None = None,
        from_left: bool = False,
    ) -> tuple[list[int], int | None]:
        """Return the ids of two texts as one prompt, as the tokenizer joins pairs.

        Also return the position of the second text's token type. The second text is cut to fit
        ``keep`` ids. Raises InvalidParameter that names a text by ``params``.
        """
        return await self.cpu_pool.run(
            len(first) + len(second),
            self.tokenizer.encode_pair,
            first,
            second,
            params=params,
            keep=keep,
            from_left=from_left,
        )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, in a thread for a long one."""
        return await self.cpu_pool.run(
            len(text), self.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat: ChatOptions | None = None,
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        tokenizer = self.tokenizer

        def encoded() -> list[int]:
            text = tokenizer.render_chat(messages, chat)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens, param="messages")

        return await self.cpu_pool.run(chat_weight(messages, chat), encoded)

    async def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, param: str | None = None
    ) -> str:
        """Return the text of ids.

        With ``param``, unknown ids raise InvalidParameter with that name.
        """

        def decoded() -> str:
            if param is not None:
                self.tokenizer.check_known(ids, param)
            return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        return await self.cpu_pool.run(len(ids), decoded)

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id."""
        tokenizer = self.tokenizer
        return await self.cpu_pool.run(
            len(ids) * 4, lambda: [tokenizer.token_text(token) for token in ids]
        )

    async def _tokenized(self, size: int, work: Callable[[], _Result]) -> _Result:
        with marked("tokenize"):
            return await self.cpu_pool.run(size, work)


class EngineCoreClient(Protocol):
    """Client of engines: ``InprocClient`` in this process, ``Dispatcher`` in a router."""

    def stream(
        self, request: EngineCoreRequest, context: RequestContext = ORDINARY
    ) -> AsyncIterator[EngineOutput | Accepted]:
        """Yield the outputs of all choices until each has finished, then stop. A pooled request
        yields one ``PooledOutput``; any other request yields ``EngineCoreOutput`` objects. One
        ``Accepted`` may precede them if ``context.tells_accepted``.

        Positions of one choice come in order without gaps or repeats. Closing the iterator
        (``aclose``) aborts the request in every process and frees its blocks.

        Raises RequestRefused if no work was started. Raises RequestFailed if the request ended
        without an answer, at the latest after its budget. Raises InvalidParameter for bad
        parameters, and for a route if the client has only one engine.
        """
        ...

    async def call(self, command: Command) -> Reply:
        """Run a command on the engine (the router: on every worker)."""
        ...

    async def describe(self) -> ModelCard: ...

    async def close(self) -> None:
        """Abort running requests and close sockets and threads. May be called twice."""
        ...


LOGPROBS_COST = 100
"""Cost of a prompt token with log-probabilities, in characters."""


class AsyncLLM(Texts):
    """One served model. All methods belong to one event loop."""

    def __init__(
        self,
        client: EngineCoreClient,
        tokenizer: Tokenizer,
        *,
        incarnation: Incarnation | None = None,
        cpu_pool: CpuPool | None = None,
        draw_seed: Callable[[], int] | None = random_seed,
        salt: Callable[[str | None], str | None] | None = None,
    ) -> None:
        """``incarnation`` is part of request keys; ``cpu_pool`` is shared with the client.

        ``draw_seed`` returns seeds of requests without one; None leaves that to the client.
        ``salt`` converts the requested cache salt.
        """
        super().__init__(tokenizer, CpuPool() if cpu_pool is None else cpu_pool)
        self.num_outputs = 0
        """Outputs received from the engine for ``stream``."""
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
        """Return the card of the served model. Raises RequestFailed at the deadline."""
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
                lambda: inputs.process(prompt, params_from(params, self._defaults), key, filled),
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
        """Raise the errors of ``prepare`` that a cheap check can find.

        Errors name the prompt ``param``.
        """
        inputs, filled = _generating(await self._input_processor()), self._filled(options, params)
        await self._tokenized(
            prompt_weight(prompt) + params_weight(params),
            lambda: inputs.check(prompt, params_from(params, self._defaults), filled, param=param),
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
                lambda: inputs.process_chat(
                    messages, params_from(params, self._defaults), key, filled, chat
                ),
            ),
        )

    async def stream(
        self, prepared: PreparedRequest, context: RequestContext = ORDINARY
    ) -> AsyncGenerator[RequestOutput, None]:
        """Send the request and yield its outputs until every choice has ended.

        An output without choices may come first: the request waits. Raises InvalidParameter for a
        running ``request_id``, RequestRefused and RequestFailed. Closing the generator aborts the
        request.
        """
        self._running.take(prepared)
        state = self._outputs.begin(prepared.processed)
        if prepared.processed.partial_on_timeout:
            context = replace(context, takes_partial=True)
        params = prepared.processed.request.params
        if params.stop and params.n > 1:  # otherwise choices end with the stream
            context = replace(context, ended=state.ended)
        try:
            source = self._client.stream(prepared.processed.request, context)
            # The protocol promises aclose, which AsyncIterator lacks.
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
                        shown = await self.cpu_pool.run(size, state.feed, output)
                    if state.finished:
                        # The id may be used again after the last output.
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
        """Run ``prepare`` and ``stream``; errors are raised at the first step."""
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
        """Run ``prepare_chat`` and ``stream``; errors are raised at the first step."""
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
        """Prepare one prompt as ``prepare_all_pooling`` does."""
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
        """Check and tokenize prompts that are pooled; nothing is sent.

        Raises InvalidParameter that names a prompt by its entry in ``names``, RequestRefused if the
        workers do not support pooling.
        """
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
        """Raise the errors of ``prepare_all_pooling`` that are found without tokenizing."""
        inputs, _ = await self._pooling(params)

        def check() -> None:
            for prompt, name in zip(prompts, names, strict=True):
                inputs.check_pooling(prompt, param=name)

        await self.cpu_pool.run(sum(map(prompt_weight, prompts)), check)

    async def pool(
        self, prepared: PreparedRequest, context: RequestContext = ORDINARY
    ) -> PooledRequestOutput:
        """Return the pooled output of a prompt of ``prepare_pooling``.

        Raises RequestRefused and RequestFailed. Cancelling it aborts the request.
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
        raise RequestFailed(FailCause.INTERNAL, "the engine returned no vector")

    async def echo(self, prepared: PreparedRequest) -> EchoedPrompt:
        """Return the prompt as shown before its answer, and the positions of its tokens."""
        processed = prepared.processed
        ids = processed.request.prompt_token_ids
        return await self.cpu_pool.run(
            8 * len(ids), echoed_prompt, self.tokenizer, processed.prompt, ids
        )

    @property
    def num_running(self) -> int:
        """Return the number of running requests."""
        return len(self._running)

    async def check_health(self) -> None:
        """Return if a model is served. Raises RequestFailed if not."""
        await self._client.describe()

    async def reset_prefix_cache(self) -> Reply:
        """Drop cached blocks that no request holds."""
        return await self.call(CommandName.RESET_PREFIX_CACHE)

    async def sleep(
        self, level: int = 1, mode: str = "abort", timeout: float = MAX_SLEEP_WAIT_S
    ) -> Reply:
        """Make every engine free its memory, or none. All KV is dropped.

        ``level`` 1 moves weights to host memory; 2 drops them. ``mode`` "abort" ends running
        requests, "wait" gives them ``timeout`` seconds.
        """
        return await put_to_sleep(self.call, level=level, mode=mode, timeout=timeout)

    async def wake_up(self, tags: Sequence[str] | None = None) -> Reply:
        """Allocate memory again: "weights", "kv_cache", or by default both. Requests need both."""
        return await self.call(CommandName.WAKE_UP, tags=",".join(tags or ()))

    async def is_sleeping(self) -> bool:
        """Return whether every engine sleeps, at least in part."""
        values = (await self.call(CommandName.IS_SLEEPING)).values
        return values.get("asleep", 0) >= values.get("engines", 1)

    async def call(self, name: CommandName, **args: str | float | bool) -> Reply:
        return await self._client.call(Command(id=next(self._numbers), name=name, args=args))

    async def close(self) -> None:
        """Abort running requests and close the client. May be called twice."""
        self.cpu_pool.close()
        await self._client.close()

    def _next_key(self) -> RequestKey:
        """Return a new key with a unique id: a client's id may repeat."""
        return RequestKey(self._incarnation, f"r{next(self._numbers)}", 0)

    def _filled(self, options: InputOptions | None, given: Params) -> InputOptions | None:
        """Return ``options`` with the model's default max_tokens. It is lowered if the context has
        less room."""
        options = self._salted(options)
        if self._default_max_tokens is None or isinstance(given, SamplingParams):
            return options
        return replace(options or InputOptions(), default_max_tokens=self._default_max_tokens)

    def _salted(self, options: InputOptions | None) -> InputOptions | None:
        if self._salt is None:
            return options
        options = options or InputOptions()
        return replace(options, cache_salt=self._salt(options.cache_salt))

    async def _pooling(self, params: PoolingParams | None) -> tuple[InputProcessor, PoolingParams]:
        """Return the input processor and the verified ``params``. Raises RequestRefused without
        pooling.
        """
        inputs = await self._input_processor()
        if inputs.card.pooling is None:
            message = "the workers are of a build that gives no vectors"
            raise RequestRefused(Refusal(code=RefusalCode.UNSUPPORTED, message=message))
        return inputs, inputs.card.pooling.check_task(params or PoolingParams())

    async def _input_processor(self) -> InputProcessor:
        """Return the input processor of the current card, which may change."""
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
