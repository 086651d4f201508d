"""Children of an LLMService as pure functions of its spec and observed facts."""
