"""Which workers take a request. Pure: no I/O, no clock, and of Tandem only protocol."""
