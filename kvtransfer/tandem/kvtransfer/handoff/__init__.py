"""The hand-off's machines: pure functions over tables, without torch, sockets or clock.

``producer`` and ``consumer`` each hold ``step(state, event, now)``; ``exports`` and ``imports``
hold one state per key and what keys share (slots, tombstones, timers). The transfer thread drives
them, and so does the model checker in tests/kvtransfer/model: the checked code is the running code.
"""
