"""One look at one service, from the read to the status."""
