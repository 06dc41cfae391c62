"""Ports for servers that a test restarts on the same port."""

import socket


def hold_port() -> socket.socket:
    """Return a socket that reserves a free loopback port until it is closed; `getsockname()[1]` is its number.

    It never listens: servers, which set SO_REUSEADDR, bind the port beside it, and while none does connections are
    refused. Without it the system may give the port to somebody else in between.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
