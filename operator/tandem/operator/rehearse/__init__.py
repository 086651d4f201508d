"""Rehearsal of the operator's writes for `tandem explain service`."""
