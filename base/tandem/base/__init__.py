"""Settings, listening addresses and fair queues: what every process uses."""
