"""OpenAI's HTTP interface with vLLM's extensions; no other package uses pydantic."""
