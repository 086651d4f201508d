"""OpenAI's HTTP interface with vLLM's extensions; pydantic lives here and nowhere else."""
