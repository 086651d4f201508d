"""Commands that start servers: up, serve, router, prefill, decode, operator, node-agent."""
