"""The log of a request's emitted tokens by (choice, position): first write wins.

Only the log decides which tokens a client receives. A second writer of a position must agree: token
1 comes from P and again from D. Disagreement means wrong KV somewhere, and the request fails
closed. Pure: no sockets, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.protocol.errors import TandemError
from tandem.protocol.outputs import EngineCoreOutput, FinishReason


class LedgerError(TandemError):
    """Outputs that cannot be written to the log."""


class Contradiction(LedgerError):
    """Another token at a position that is already written: fail closed."""


class Gap(LedgerError):
    """A token beyond the next position, or a choice that does not exist: the worker is at fault."""


class _Choice:
    __slots__ = ("cut", "finish", "tokens")

    def __init__(self, tokens: Iterable[int], finish: FinishReason | None) -> None:
        self.tokens = list(tokens)
        self.finish = finish
        self.cut = False
        """True if its reader ended it, and no worker has reported its end."""


class Ledger:
    """All choices of one request over all its attempts."""

    def __init__(
        self,
        num_choices: int,
        emitted: Sequence[Sequence[int]] = (),
        finished: Sequence[int] = (),
    ) -> None:
        self._choices = [
            _Choice(
                emitted[choice] if choice < len(emitted) else (),
                FinishReason.STOP if choice in finished else None,
            )
            for choice in range(num_choices)
        ]
        self._open = sum(choice.finish is None for choice in self._choices)
        self._told_prompt = False
        self.num_repeated = 0
        """Tokens that were written before and agreed."""

    @property
    def done(self) -> bool:
        """Return whether every choice has finished."""
        return self._open == 0

    @property
    def told(self) -> bool:
        """Return whether workers have reported every choice's end: none is computed further."""
        return self._open == 0 and not any(choice.cut for choice in self._choices)

    @property
    def num_tokens(self) -> int:
        """Return the emitted tokens over all choices."""
        return sum(len(choice.tokens) for choice in self._choices)

    @property
    def emitted(self) -> tuple[tuple[int, ...], ...]:
        """Return tokens per choice for a further attempt; () if there are none at all."""
        if not any(choice.tokens for choice in self._choices):
            return ()
        return tuple(tuple(choice.tokens) for choice in self._choices)

    @property
    def finished_choices(self) -> tuple[int, ...]:
        """Return the choices that are not to be continued."""
        return tuple(
            index for index, choice in enumerate(self._choices) if choice.finish is not None
        )

    def length(self, choice: int) -> int:
        """Return the emitted tokens of one choice."""
        return len(self._choices[choice].tokens)

    def write(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Write the new part of ``output`` and return it, or None if nothing is new.

        Raises Contradiction if a written token differs, Gap for an impossible position or choice.
        Tokens after a choice's end are repeats if they were written, else a Gap. If its reader
        ended it, they are ignored: a worker may not know the end yet.
        """
        if not 0 <= output.choice < len(self._choices):
            raise Gap(f"choice {output.choice} of {len(self._choices)}")
        choice = self._choices[output.choice]
        tokens = choice.tokens
        if output.position == len(tokens) and choice.finish is None:  # the usual case
            tokens.extend(output.token_ids)
            return self._finish(choice, output)
        if choice.cut:
            choice.cut = output.finish is None
            return None
        return self._overlap(choice, output)

    def end(self, choice: int) -> None:
        """End a choice whose reader has found its end in the written tokens."""
        ended = self._choices[choice]
        if ended.finish is None:
            ended.finish, ended.cut = FinishReason.STOP, True
            self._open -= 1

    def answered(self) -> None:
        """Mark the one choice of a request without tokens as answered."""
        (choice,) = self._choices
        choice.finish = FinishReason.STOP
        self._open = 0

    def _overlap(self, choice: _Choice, output: EngineCoreOutput) -> EngineCoreOutput | None:
        tokens, start = choice.tokens, output.position
        if not 0 <= start <= len(tokens):
            raise Gap(f"choice {output.choice}: position {start} after {len(tokens)} tokens")
        known = tokens[start : start + len(output.token_ids)]
        if tuple(known) != output.token_ids[: len(known)]:
            raise Contradiction(
                f"choice {output.choice}, position {start}: "
                f"{list(output.token_ids[: len(known)])} after {known}"
            )
        self.num_repeated += len(known)
        fresh = output.token_ids[len(known) :]
        if choice.finish is not None:
            if fresh:
                raise Gap(f"choice {output.choice}: {len(fresh)} tokens after its end")
            return None
        ends = output.finish is not None and start + len(output.token_ids) == len(tokens)
        if not (fresh or ends or (output.prompt_logprobs and not self._told_prompt)):
            return None
        tokens.extend(fresh)
        return self._finish(choice, _without(output, len(known)))

    def _finish(self, choice: _Choice, output: EngineCoreOutput) -> EngineCoreOutput:
        if output.prompt_logprobs is not None:
            self._told_prompt = True
        if output.finish is not None:
            choice.finish = output.finish
            self._open -= 1
        return output


def _without(output: EngineCoreOutput, count: int) -> EngineCoreOutput:
    """Return the output without its first ``count`` tokens."""
    return EngineCoreOutput(
        request=output.request,
        attempt=output.attempt,
        choice=output.choice,
        position=output.position + count,
        token_ids=output.token_ids[count:],
        finish=output.finish,
        stop_token=output.stop_token,
        logprobs=None if output.logprobs is None else output.logprobs[count:],
        prompt_logprobs=output.prompt_logprobs,
        num_cached_tokens=output.num_cached_tokens,
    )
