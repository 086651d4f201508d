"""The live page of a router: static files, which ask the same HTTP as everybody does."""
