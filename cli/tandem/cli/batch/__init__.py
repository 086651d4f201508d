"""OpenAI's batch files: ``files`` opens them, ``lines`` reads and checks them, and ``asking`` sends
what they hold to a server."""
