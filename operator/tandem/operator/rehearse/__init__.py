"""Rehearsal of the operator's writes for a service, for `tandem explain service`."""
