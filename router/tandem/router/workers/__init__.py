"""Links to workers: who is up, what they serve, how loaded they are."""
