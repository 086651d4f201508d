"""Scheduler: the plan loop, its queues and its interfaces, without torch."""
