"""One reconcile pass of one service, from the read to the status."""
