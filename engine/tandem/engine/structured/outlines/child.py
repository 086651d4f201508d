"""Compiles in a process of its own: ``python -m`` this module, with a descriptor and limits.

Started by ``CompileProcess`` with an open channel, and ends with it. What outlines-core takes is
bounded by the kernel: memory from the start, processor time anew for each job. It answers with a
packed table or a line of words, and nothing that whoever reads it would have to trust.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress

import msgspec
from outlines_core import Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

from tandem.engine.executor.channel import ChannelClosed, inherited
from tandem.engine.structured.outlines import tables
from tandem.engine.structured.outlines.characters import NEVER
from tandem.engine.structured.outlines.jobs import MAX_EXPRESSION_BYTES, Job, Limits

_SEND_SECONDS = 10.0
_NICE = 5
"""Behind the engine where processors are short."""
READY, TABLE, WORDS = b"R", b"T", b"W"
"""What a frame begins with."""


def main() -> None:
    """Serve the channel that is named on the command line until it closes."""
    channel = inherited(int(sys.argv[1]))
    limits = msgspec.json.decode(sys.argv[2], type=Limits)
    os.nice(_NICE)
    vocabulary = Vocabulary(tables.BYTES, {bytes([byte]): [byte] for byte in range(tables.BYTES)})
    with suppress(ValueError, OSError):  # where a system has no such limit, time is the bound
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    with suppress(ChannelClosed):
        channel.send(READY, seconds=_SEND_SECONDS)
        while True:
            job = msgspec.json.decode(channel.receive(seconds=None), type=Job)
            _limit_time(job.seconds)
            try:
                answer = TABLE, _compiled(job, vocabulary).pack()
            except (ValueError, MemoryError) as error:
                answer = WORDS, _words(error).encode()
            channel.send(*answer, seconds=_SEND_SECONDS)


def _compiled(job: Job, vocabulary: Vocabulary) -> tables.Tables:
    """The table of a job. Raises ValueError, and TableError in words of its own."""
    text = job.expression
    if job.schema is not None:
        text = build_regex_from_schema(job.schema, job.whitespace)
    if len(text) > MAX_EXPRESSION_BYTES:
        raise tables.TableError(
            f"what makes an expression of at most {MAX_EXPRESSION_BYTES:,} bytes"
        )
    # A match is whole only if it is found at the end alone: else the first alternative that
    # matches hides longer ones.
    # And outlines-core takes none that may begin with an assertion, which the end of the text is.
    index = Index(f"\\x00(?:{text})\\z", vocabulary)
    transitions, initial = index.get_transitions(), index.get_initial_state()
    return tables.made_of(transitions, index.get_final_states(), ord(NEVER), initial)


def _limit_time(seconds: float) -> None:
    """The job's processor time: beyond it the process is ended by the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


def _words(error: Exception) -> str:
    """Of an error, for whoever wrote the text."""
    if isinstance(error, MemoryError):
        return "what compiles within less memory"
    words = " ".join(str(error).split())
    if isinstance(error, tables.TableError):
        return words
    if "vocabulary provided is incompatible" in words:
        return "what some text matches"
    return f"what outlines-core compiles: {words[:300]}"


if __name__ == "__main__":
    main()
