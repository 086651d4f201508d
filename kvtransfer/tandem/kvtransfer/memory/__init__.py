"""Memory that KV moves between: slots on host and GPU (header, sizes), and blocks with tags."""
