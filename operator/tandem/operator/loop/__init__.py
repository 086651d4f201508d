"""Who may work and what wakes them: the Lease, watches, the periodic list and the queue."""
