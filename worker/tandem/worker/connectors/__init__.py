"""Connectors between the engine and kvtransfer: hand-offs, and pulls and loans of cached
prefixes."""
