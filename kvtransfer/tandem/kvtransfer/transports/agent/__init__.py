"""KV between workers that do not see each other's GPU, copied by their node's agent.

P registers its memory (``giving``), D a ring of landing slots (``asking``). D requests P's blocks
by P's incarnation and secret, which came over the authenticated control link, and copies landed
data into its blocks itself. The messages are in ``wire``.
"""
