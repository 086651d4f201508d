"""The scheduler: the plan loop, its queues and its interfaces. No torch."""
