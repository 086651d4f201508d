"""How many requests may be under way at once, and how long one may wait for its turn."""
