"""Requests to this machine: they pass every proxy by, whatever the environment says.

A proxy reaches none of this machine's loopback addresses, and most programs send them to it all the same.
"""

from collections.abc import MutableMapping
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")


def exempt_loopback(environ: MutableMapping[str, str]) -> None:
    """Name the loopback addresses in `no_proxy`, for every HTTP and gRPC client of a process and its children."""
    if not any(environ.get(each) or environ.get(each.upper()) for each in _PROXIES):
        return  # a variable `no_proxy` alone would hide the proxies of macOS's settings
    named = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = [host for host in map(str.strip, named.split(",")) if host]
    if "*" in hosts:
        return
    hosts += [host for host in _HOSTS if host not in hosts]
    environ["no_proxy"] = environ["NO_PROXY"] = ",".join(hosts)  # some clients read one of them alone


def open_url(request: Request, *, timeout_s: float) -> Any:  # Any: what urllib returns has no type
    """Send a request with urllib, by the environment's proxy unless it is for this machine. Raises as `urlopen`."""
    handlers = [ProxyHandler({})] if is_loopback(request.full_url) else []
    return build_opener(*handlers).open(request, timeout=timeout_s)


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
