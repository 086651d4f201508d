"""Children of an LLMService as pure functions of its spec and of what was observed."""
