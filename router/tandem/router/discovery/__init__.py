"""Where workers are: a fixed list of addresses, or the pods of a cluster."""
