"""Leadership and wake-ups of the operator: Lease, watches, periodic lists, queue."""
