"""`tandem node-agent`: copies KV between workers of its node that do not see each other's GPU.

It holds the workers' registrations and runs consumers' copies in turn. Workers call it at a Unix
socket in the node's folder, with messages of ``transports/agent/wire``.
"""
