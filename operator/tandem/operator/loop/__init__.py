"""Leadership and wake-ups of the operator: the Lease, watches, the periodic list and the queue."""
