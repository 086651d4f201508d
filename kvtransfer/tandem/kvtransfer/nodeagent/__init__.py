"""`tandem node-agent`: copies KV between workers of its node that do not see each other's GPU.

It holds the registrations of workers (``registrations``) and copies what consumers ask for, a
request of each in turn (``turns``). It keeps nothing of a request after its copy. Workers call it
at a Unix socket in the node's folder (``server``), with messages of ``transports/agent/wire``. Only
its metrics are on the network (``series``), and none if no port is given.
"""
