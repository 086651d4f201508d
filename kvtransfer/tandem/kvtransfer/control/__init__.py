"""The control plane: ZMQ links to peers, their HELLOs, beats and ends.

One thread at a time uses the sockets: the transfer thread while it has nothing else to do, else the
control thread. Messages of a hand-off go to the transfer thread's queue in the order of arrival,
link changes included. The transfer thread's messages go out on the link that it named, or are
dropped.
"""
