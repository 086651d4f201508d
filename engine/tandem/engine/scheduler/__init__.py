"""What one step computes: the plan loop, its queues and its seams. No torch."""
