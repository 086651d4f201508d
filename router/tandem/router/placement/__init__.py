"""Choice of workers for a request, without I/O and clocks."""
