"""Bodies of requests: their types, their bounds, and their reading."""
