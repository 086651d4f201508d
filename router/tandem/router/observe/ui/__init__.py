"""The live page of a router: static files, which use the public HTTP interface."""
