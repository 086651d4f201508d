"""KV between workers that do not see each other's GPU: the agent of their node copies it.

``cuda_p2p_agent`` does it between GPUs, ``shm_agent`` between workers on a CPU. P registers its
memory with the agent (``giving``), to be read. D registers a ring of landing slots (``asking``),
to be written, and no other memory. D asks for P's blocks by P's incarnation and secret, which
came over the authenticated control link, and copies landed data into its blocks itself
(``transport``). The agent is ``kvtransfer/nodeagent``; the messages are in ``wire``.
"""
