"""What every socket of a link is set to."""

from __future__ import annotations

import zmq

from tandem.link.sockets import MAX_LINKS, Context, open_socket


def test_all_may_call_at_once():
    """As they do when the end that they call has begun anew: who does not fit into the kernel's
    queue is dropped, and calls again after a second, three, seven."""
    context: Context = zmq.Context()
    socket = open_socket(context, zmq.ROUTER, max_bytes=100, unsent=1)
    try:
        assert int(socket.getsockopt(zmq.BACKLOG)) >= MAX_LINKS
    finally:
        socket.close(0)
        context.term()
