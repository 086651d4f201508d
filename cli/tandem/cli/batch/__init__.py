"""OpenAI's batch files: ``lines`` reads and checks them, ``asking`` sends them to a server."""
