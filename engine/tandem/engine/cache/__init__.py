"""Block tables, reference counts and the prefix cache, without torch; ranks hold the KV itself."""
