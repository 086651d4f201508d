"""A queue that wakes a reader which sleeps on descriptors: nothing is lost, nobody sleeps on."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from tandem.link.sockets import raise_descriptor_limit
from tandem.link.wake_queue import WakeQueue

SECONDS = 30.0


@pytest.fixture
def queue() -> Iterator[WakeQueue[int]]:
    made: WakeQueue[int] = WakeQueue(3)
    yield made
    made.close()


def is_readable(queue: WakeQueue[int]) -> bool:
    return bool(select.select([queue.fileno()], [], [], 0)[0])


def test_what_is_put_is_taken_in_order(queue: WakeQueue[int]) -> None:
    queue.put(1)
    queue.add(2)
    assert queue.offer(3)
    assert not queue.empty
    assert queue.take() == [1, 2, 3]
    assert queue.empty


def test_who_offers_is_told_when_too_many_wait(queue: WakeQueue[int]) -> None:
    """What must not be lost is put all the same; what was refused is not there."""
    assert [queue.offer(each) for each in range(4)] == [True, True, True, False]
    queue.put(9)
    assert queue.take() == [0, 1, 2, 9]
    assert queue.offer(5)


def test_a_put_writes_to_the_descriptor_only_while_somebody_listens(queue: WakeQueue[int]) -> None:
    """A burst is one wake, which is over when the reader is at work again."""
    queue.put(1)
    assert not is_readable(queue)
    with queue.listening() as bell:
        assert bell == queue.fileno()
        for number in range(10_000):
            queue.put(number)
        assert is_readable(queue)
    assert not is_readable(queue)
    assert len(queue.take()) == 10_001


def test_a_wake_reaches_who_does_not_listen_until_it_is_hushed(queue: WakeQueue[int]) -> None:
    """More of them than a pipe holds block nobody."""
    for _ in range(100_000):
        queue.wake()
    assert is_readable(queue)
    queue.hush()
    assert not is_readable(queue)


def test_a_wait_ends_with_what_is_there_what_comes_and_what_others_have(
    queue: WakeQueue[int],
) -> None:
    queue.add(1)
    queue.wait(None)
    assert queue.take() == [1]
    queue.wait(0.0001)
    soon = threading.Timer(0.1, queue.put, [2])
    soon.start()
    queue.wait(SECONDS)
    soon.join()
    assert queue.take() == [2]


def test_a_wait_takes_descriptors_of_any_number(queue: WakeQueue[int]) -> None:
    """Above 1,023, too, where a process with many links has its next ones."""
    raise_descriptor_limit(2048)
    read, write = os.pipe()
    high = fcntl.fcntl(read, fcntl.F_DUPFD, 1500)
    try:
        os.write(write, b"x")
        queue.wait(None, [high])
        queue.wait(0.0001, [high])
        assert queue.take() == []
    finally:
        for descriptor in (read, write, high):
            os.close(descriptor)


def test_no_item_is_slept_on_however_many_threads_put() -> None:
    """The reader looks again after it has begun to listen, so that nothing falls between."""
    queue: WakeQueue[tuple[int, int]] = WakeQueue()
    each = 3000
    seen: dict[int, list[int]] = {number: [] for number in range(4)}

    def write(number: int) -> None:
        for count in range(each):
            queue.put((number, count))
            if count % 7 == number:
                threading.Event().wait(0.00005)

    writers = [threading.Thread(target=write, args=[number]) for number in seen]
    gives_up = time.monotonic() + SECONDS
    for writer in writers:
        writer.start()
    try:
        while sum(map(len, seen.values())) < 4 * each:
            queue.wait(SECONDS)
            assert time.monotonic() < gives_up, "a wait ended by its deadline"
            for number, count in queue.take():
                seen[number].append(count)
    finally:
        for writer in writers:
            writer.join()
        queue.close()
    assert all(counts == list(range(each)) for counts in seen.values())


def test_a_closed_queue_takes_nothing_and_harms_no_other_descriptor(queue: WakeQueue[int]) -> None:
    """The numbers of its descriptors may be somebody else's by then."""
    queue.put(1)
    queue.close()
    queue.close()
    pipes = [os.pipe() for _ in range(4)]
    try:
        queue.put(2)
        queue.wake()
        assert queue.take() == [1]
        readers = [read for read, _ in pipes]
        assert select.select(readers, [], [], 0)[0] == []
    finally:
        for pipe in pipes:
            for descriptor in pipe:
                os.close(descriptor)


def test_a_signal_handler_may_put_while_its_thread_puts(queue: WakeQueue[int]) -> None:
    """It may have interrupted who holds the queue's lock."""
    signals = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        queue.put(0)

    before = signal.signal(signal.SIGALRM, on_signal)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with queue.listening():
            while len(signals) < 50:
                queue.put(1)
                queue.hush()
                queue.take()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_queue_that_is_dropped_gives_its_descriptors_back() -> None:
    queue: WakeQueue[int] = WakeQueue()
    descriptor = queue.fileno()
    del queue
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
