"""Memory that another process can map, by a file descriptor: of a GPU, of the host."""
