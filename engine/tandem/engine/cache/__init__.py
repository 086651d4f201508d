"""Block tables, reference counts and the prefix cache. No torch: the slab itself is a rank's."""
