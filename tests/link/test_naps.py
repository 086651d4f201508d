"""Sleeping on descriptors for a time that is no whole number of milliseconds."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tandem.link.naps import sleep_on


def test_a_readable_descriptor_ends_the_sleep() -> None:
    """Whichever of them it is, and whether it was readable before or becomes so."""
    first, second = os.eventfd(0), os.eventfd(0)
    try:
        timer = threading.Timer(0.05, os.eventfd_write, (second, 1))
        timer.start()
        sleep_on([first, second], 3600.0)
        timer.join()
        sleep_on([first, second], 3600.0)
    finally:
        os.close(first)
        os.close(second)


@pytest.mark.parametrize("seconds", [0.0, 2.5e-5, 0.0015])
def test_the_sleep_ends_with_its_time(seconds: float) -> None:
    """And not before: without anything to read, and by no descriptor at all."""
    descriptor = os.eventfd(0)
    try:
        for watched in ([descriptor], []):
            began = time.monotonic()
            sleep_on(watched, seconds)
            assert time.monotonic() - began >= seconds
    finally:
        os.close(descriptor)
