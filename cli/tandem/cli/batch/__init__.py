"""OpenAI's batch files, answered by a server."""
