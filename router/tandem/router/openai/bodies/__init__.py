"""What clients may send: bodies as they stand, their bounds, and their reading."""
