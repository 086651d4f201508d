"""Applies the results of a step to the requests: tokens, ends, forks, outputs.

A result may come a step late: the token of an ended sequence is discarded; a preempted one keeps
its token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import eq, sub

from tandem.engine.request import Request, RequestState
from tandem.engine.scheduler.drafter import Drafter
from tandem.engine.scheduler.request_table import HANDED_OVER, RequestTable
from tandem.engine.scheduler.stats import note_chunk
from tandem.engine.step import DraftSampled, ModelRunnerOutput, Sampled, SeqId
from tandem.protocol.errors import FailCause, TandemError
from tandem.protocol.kv import Fence, FirstToken, frozen
from tandem.protocol.outputs import (
    EngineCoreOutput,
    EngineOutput,
    Finish,
    FinishReason,
    PooledOutput,
    finish_of,
)
from tandem.protocol.requests import Consume, Produce

_STOP = Finish(FinishReason.STOP)

Chunk = tuple[Request, int, int, int]
"""Row of a step that computed prompt tokens: request, first, end, preemptions so far."""


class Updater:
    """Applies tokens; the only place where sequences grow."""

    def __init__(
        self, request_table: RequestTable, *, max_num_seqs: int, drafter: Drafter | None = None
    ) -> None:
        self._request_table = request_table
        self._drafter = drafter
        self._max_num_seqs = max_num_seqs

    def update_from_output(
        self, output: ModelRunnerOutput, chunks: Sequence[Chunk], now: float
    ) -> None:
        """Apply one step's result. ``chunks`` are its rows over prompt tokens."""
        for request, start, end, preemptions in chunks:
            self._note_chunk(request, start, end, preemptions, output)
            note_chunk(request, start, end, now)
        for seq, values in output.pooled.items():
            self._pooled(seq, values, now)
        request_table = self._request_table
        by_seq, outbox = request_table.by_seq, request_table.outbox
        router: bytes | None = None
        outputs: list[EngineOutput] = []
        earlier: list[float] = []
        for sampled in output.sampled:
            found = by_seq.get(sampled.seq)
            if found is None:
                request_table.stats.discarded_tokens += len(sampled.token_ids)
                continue
            request = found
            request.num_output_placeholders -= 1
            if request.num_generated == 0:
                self._first(request, sampled, now)
                continue
            ids = sampled.token_ids[0]
            (token,) = ids
            token_ids = request.token_ids
            position = len(token_ids) - request.num_prompt
            token_ids.append(token)
            request.num_generated += 1
            earlier.append(request.last_token_at)
            request.last_token_at = now
            finish = None
            if token in request.enders or len(token_ids) >= request.max_len:
                finish = self._verdict(request, token, position + 1)
                if request.constraint is not None:
                    finish = self._follow(request, token, finish, now)
                    if request.finished:
                        continue
            logprobs = sampled.logprobs
            if request.router != router:
                router = request.router
                outputs = outbox.to(router)
            outputs.append(
                EngineCoreOutput(
                    request.request_id,
                    request.attempt,
                    request.choice,
                    position,
                    ids,
                    None if finish is None else finish.reason,
                    None if finish is None else finish.stop_token,
                    None if logprobs is None else logprobs[0],
                )
            )
            if finish is not None:
                request_table.let_go(request, finish.reason, now)
        request_table.stats.generated_tokens += len(earlier)
        request_table.stats.token_gaps.update(map(sub, repeat(now), earlier))
        if output.drafted or output.num_proposed:
            self._update_drafts(output.drafted, output.num_proposed, now)

    def _update_drafts(
        self, drafted: Sequence[DraftSampled], num_proposed: Mapping[SeqId, int], now: float
    ) -> None:
        for each in drafted:
            self._update_drafted(each, now)
        for seq, count in num_proposed.items():
            request = self._request_table.by_seq.get(seq)
            if request is not None:
                request.num_proposed = count

    def announce(self, chunks: Sequence[Chunk], fence: Fence) -> None:
        """Announce KV of a step's ``chunks`` before its samples are known."""
        for request, _, end, preemptions in chunks:
            self._announce(request, end, preemptions, fence)

    def known_first(self, request: Request, first: Sequence[FirstToken], now: float) -> None:
        """Apply first tokens of the producer; the request's KV is here."""
        self._apply_first(request, _in_order(request, first), now)

    def ended_elsewhere(
        self, request: Request, first: Sequence[FirstToken], now: float, *, keep: bool
    ) -> None:
        """Apply first tokens that end every choice, without KV. ``keep``: KV may still be written
        into the blocks."""
        tokens = _in_order(request, first)
        number = request.num_output + 1
        verdicts = [self._verdict_of_first(request, each.token_id, number) for each in tokens]
        if any(verdict is None for verdict in verdicts):
            message = "the first token was reported to end the request, but does not"
            self._request_table.fail(request.group, FailCause.IDENTITY, message, now, keep=keep)
            return
        self._note_first(request, now)
        for each, verdict in zip(tokens, verdicts, strict=True):
            self._emit_first(request, each, verdict)
        request.num_generated = len(tokens)
        reason = verdicts[0].reason if verdicts[0] is not None else HANDED_OVER
        self._request_table.let_go(request, reason, now, keep=keep)

    def close_forced(self, request: Request, finish: Finish, now: float) -> None:
        """End a choice whose last token, but not its end, an earlier attempt emitted."""
        position = request.num_output
        self._request_table.outbox.emit(
            request.router,
            EngineCoreOutput(
                request.request_id,
                request.attempt,
                request.choice,
                position,
                (),
                finish.reason,
                finish.stop_token,
            ),
        )
        self._request_table.let_go(request, finish.reason, now)

    def _pooled(self, seq: SeqId, values: bytes, now: float) -> None:
        request = self._request_table.by_seq.get(seq)
        if request is None:
            return
        request.num_output_placeholders -= 1
        self._note_first(request, now)
        output = PooledOutput(
            request.request_id, request.attempt, values, request.num_prompt, request.group.num_hit
        )
        self._request_table.outbox.emit(request.router, output)
        self._request_table.let_go(request, output.finish, now)

    def _update_drafted(self, drafted: DraftSampled, now: float) -> None:
        sampled = drafted.sampled
        stats, request = self._request_table.stats, self._request_table.by_seq.get(sampled.seq)
        if request is None:
            stats.discarded_tokens += len(sampled.token_ids[0])
            return
        request.num_output_placeholders -= 1
        if drafted.replayed:
            stood = request.token_ids[-len(drafted.replayed) :]
            stats.replayed_tokens += len(stood)
            stats.agreed_tokens += sum(map(eq, stood, drafted.replayed))
        else:
            self._settle_drafts(request, drafted)
        if request.num_generated == 0:
            self._first(request, sampled, now)
        else:
            self._take(request, sampled, now)

    def _settle_drafts(self, request: Request, drafted: DraftSampled) -> None:
        """Take back what was counted for drafts that were not accepted."""
        accepted = len(drafted.sampled.token_ids[0]) - 1
        request.num_pending_drafts -= drafted.num_tokens
        request.num_output_placeholders -= drafted.num_tokens
        if request.state is RequestState.RUNNING:
            request.num_computed -= drafted.num_tokens - accepted
        self._request_table.stats.draft_tokens += drafted.num_drafts
        self._request_table.stats.accepted_tokens += accepted
        assert self._drafter is not None, "rows with drafts are planned by a drafter"
        self._drafter.note(request, accepted)

    def _take(self, request: Request, sampled: Sampled, now: float) -> None:
        """Append tokens to a running sequence, up to one that ends it; only their KV is valid."""
        assert request.constraint is None, "several tokens under a mask of one position"
        stats, (ids,) = self._request_table.stats, sampled.token_ids
        token_ids, position = request.token_ids, request.num_output
        finish, count = None, 0
        while finish is None and count < len(ids):
            token = ids[count]
            token_ids.append(token)
            count += 1
            if token in request.enders or len(token_ids) >= request.max_len:
                finish = self._verdict(request, token, position + count)
        request.num_generated += count
        stats.generated_tokens += count
        stats.token_gaps[now - request.last_token_at] += 1
        request.last_token_at = now
        self._request_table.outbox.emit(
            request.router,
            EngineCoreOutput(
                request.request_id,
                request.attempt,
                request.choice,
                position,
                ids[:count],
                None if finish is None else finish.reason,
                None if finish is None else finish.stop_token,
                None if sampled.logprobs is None else sampled.logprobs[0][:count],
            ),
        )
        if finish is not None:
            self._request_table.let_go(request, finish.reason, now)

    def _note_chunk(
        self,
        request: Request,
        start: int,
        end: int,
        preemptions: int,
        output: ModelRunnerOutput,
    ) -> None:
        logprobs = output.prompt_logprobs.get(request.seq)
        have = request.prompt_logprobs
        if logprobs is not None and have is not None and start < len(have):
            have.extend(logprobs[len(have) - start - 1 :])
        self._announce(request, end, preemptions, output.fence)

    def _announce(self, request: Request, end: int, preemptions: int, fence: Fence) -> None:
        """Report computed tokens that the connector does not know; a cached prefix is part of the
        first chunk."""
        here = request.state is RequestState.RUNNING and request.num_preemptions == preemptions
        if not here or self._request_table.connector is None:
            return
        upto = min(end, request.num_prefill)
        if upto > request.num_announced:
            tokens = range(request.num_announced, upto)
            request.num_announced = upto
            self._request_table.connector.computed(
                request, frozen(request.block_tables), tokens, fence
            )

    def _first(self, request: Request, sampled: Sampled, now: float) -> None:
        logprobs = sampled.logprobs or ((None,),) * len(sampled.choices)
        first = [
            FirstToken(choice, tokens[0], known[0])
            for choice, tokens, known in zip(
                sampled.choices, sampled.token_ids, logprobs, strict=True
            )
        ]
        self._request_table.stats.generated_tokens += len(first)
        self._apply_first(request, first, now)

    def _apply_first(self, request: Request, first: Sequence[FirstToken], now: float) -> None:
        self._note_first(request, now)
        if isinstance(request.kv, Produce):
            self._hand_over(request, first, now)
            return
        children = [self._child_of(request, each.choice) for each in first[1:]]
        request.choices = request.own_choice
        self._request_table.constrained.limit(request, request.max_len)
        self._place(request, children)
        for each, sequence in zip(first, [request, *children], strict=True):
            if not sequence.finished:
                self._take_first(sequence, each, now)
        if request.group.cut:
            for sequence in (request, *children):
                self._request_table.end_cut(sequence, now)

    def _note_first(self, request: Request, now: float) -> None:
        group = request.group
        if group.first_token is None:
            group.first_token = now
            self._request_table.stats.first_token_times.append(now - group.arrival)

    def _take_first(self, request: Request, first: FirstToken, now: float) -> None:
        finish = self._verdict(request, first.token_id, request.num_output + 1)
        if request.constraint is not None:
            finish = self._follow(request, first.token_id, finish, now)
            if request.finished:
                return
        self._emit_first(request, first, finish)
        request.token_ids.append(first.token_id)
        request.num_generated = 1
        request.last_token_at = now
        if finish is not None:
            self._request_table.let_go(request, finish.reason, now)

    def _hand_over(self, request: Request, first: Sequence[FirstToken], now: float) -> None:
        number = request.num_output + 1
        verdicts = [self._verdict_of_first(request, each.token_id, number) for each in first]
        for each, verdict in zip(first, verdicts, strict=True):
            self._emit_first(request, each, verdict)
        reasons = [verdict.reason for verdict in verdicts if verdict is not None]
        ended = reasons[0] if len(reasons) == len(first) else None
        connector = self._request_table.connector
        assert connector is not None, "a producer without a connector"
        connector.first_tokens(request, first, ended)
        request.num_generated = len(first)
        self._request_table.let_go(request, ended or HANDED_OVER, now)

    def _child_of(self, parent: Request, choice: int) -> Request:
        priority, turn, number, _ = parent.order
        child = Request(
            self._request_table.next_seq(),
            parent.group,
            (choice,),
            token_ids=parent.token_ids.copy(),
            num_prompt=parent.num_prompt,
            order=(priority, turn, number, choice),
            max_len=parent.max_len,
            block_hashes=parent.block_hashes.copy(),
        )
        child.prompt_logprobs = None
        child.remote_done = True
        self._request_table.enter(child)
        if parent.group.gates:
            self._request_table.fork(parent, child)
        return child

    def _place(self, parent: Request, children: Sequence[Request]) -> None:
        request_table = self._request_table
        for child in children:
            seats = self._max_num_seqs - len(request_table.running) - len(request_table.loading)
            there = parent.state is RequestState.RUNNING
            if there and seats > 0 and request_table.manager.fork(parent, child):
                child.num_computed = parent.num_computed
                request_table.join(child)
            else:
                request_table.queue_again(child)  # it had no blocks that were taken from it

    def _verdict(self, request: Request, token: int, number: int) -> Finish | None:
        return finish_of(
            request.params,
            request.group.source.eos_token_ids,
            token,
            num_emitted=number,
            num_prompt=request.num_prompt,
            max_model_len=request.group.max_model_len,
        )

    def _verdict_of_first(self, request: Request, token: int, number: int) -> Finish | None:
        finish = self._verdict(request, token, number)
        if not request.group.gates or (finish is not None and finish.reason is FinishReason.STOP):
            return finish
        if request.state is RequestState.GATED:
            return finish or _STOP  # its constraint was applied where it was drawn
        constraint = request.constraint
        try:
            return _STOP if constraint is not None and constraint.ends_with(token) else finish
        except TandemError:
            return finish  # the consumer reports the end

    def _follow(
        self, request: Request, token: int, finish: Finish | None, now: float
    ) -> Finish | None:
        constraint = request.constraint
        assert constraint is not None, "nothing to follow"
        if finish is not None and finish.reason is FinishReason.STOP:
            return finish
        try:
            if constraint.accept(token, last=finish is not None):
                return _STOP
        except TandemError as error:
            message = f"token {token} is not one that the request's constraint allows: {error}"
            brought = isinstance(request.kv, Consume) and request.num_generated == 0
            cause = FailCause.IDENTITY if brought else FailCause.INTERNAL
            self._request_table.fail(request.group, cause, message, now)
            return None
        return finish

    def _emit_first(self, request: Request, first: FirstToken, finish: Finish | None) -> None:
        logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        brought = isinstance(request.kv, Consume)
        num_cached = min(request.group.num_hit, request.num_prompt)
        self._request_table.outbox.emit(
            request.router,
            EngineCoreOutput(
                request.request_id,
                request.attempt,
                first.choice,
                request.num_output,
                (first.token_id,),
                None if finish is None else finish.reason,
                None if finish is None else finish.stop_token,
                None if first.logprobs is None else (first.logprobs,),
                None if logprobs is None else tuple(logprobs[: request.num_prompt]),
                None if brought else num_cached,
            ),
        )


def _in_order(request: Request, first: Sequence[FirstToken]) -> list[FirstToken]:
    by_choice = {each.choice: each for each in first}
    return [by_choice[choice] for choice in request.choices]
