"""`tandem node-agent`: copies KV between workers of its node that do not see each other's GPU.

It knows what registered with it (``registrations``), copies what consumers ask for, a request of
each in turn (``turns``), and holds nothing of a request beyond its copy. It is called at a Unix
socket in the node's folder (``server``), whose words are ``transports/agent/wire``. A network sees
its numbers alone (``series``), and none where no port is given.
"""
