"""Interfaces of the router: OpenAI's and Anthropic's HTTP, gRPC, and administration."""
