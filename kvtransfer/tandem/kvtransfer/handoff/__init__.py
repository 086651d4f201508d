"""State machines of the hand-off: pure functions over tables, without torch, sockets or clock.

``producer`` and ``consumer`` hold ``step(state, event, now)``; ``exports`` and ``imports`` hold the
states by key. The transfer thread and the model checker (tests/kvtransfer/model) run the same code.
"""
