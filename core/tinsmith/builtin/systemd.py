"""Tells systemd when the server answers and when it stops, for units of `Type=notify`. Elsewhere it does nothing.

The protocol is sd_notify(3): one datagram to the socket that $NOTIFY_SOCKET names.
"""

import os
import socket
from typing import Final

from tinsmith.hook_values import ServerStarted, ServerStopping
from tinsmith.hookspecs import hookimpl

VARIABLE: Final = "NOTIFY_SOCKET"


@hookimpl
def tinsmith_server_started(event: ServerStarted) -> None:
    models = ", ".join(event.base_models)
    _notify(f"READY=1\nSTATUS=answering on {event.url}: {models}")


@hookimpl
def tinsmith_server_stopping(event: ServerStopping) -> None:
    _notify(f"STOPPING=1\nSTATUS=stopping on {event.url}")


def _notify(state: str) -> None:
    address = os.environ.get(VARIABLE, "")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier:
        notifier.setblocking(False)  # noqa: FBT003 - the library's signature; hooks must not block
        notifier.sendto(state.encode(), address)
