"""Flags of commands: parsing, files, secrets, flags of other servers."""
