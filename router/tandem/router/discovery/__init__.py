"""Discovery of workers: a fixed list of addresses, or the pods of a cluster."""
