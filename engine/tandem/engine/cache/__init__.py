"""Block tables, reference counts and the prefix cache. No torch: the KV cache itself is a
rank's."""
