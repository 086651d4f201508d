"""What the operator would do for a service, without doing it: for `tandem explain service`."""
