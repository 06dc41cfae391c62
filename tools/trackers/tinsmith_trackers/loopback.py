"""Requests to this machine pass every proxy by. As `tinsmith.loopback`, for a package that does without tinsmith."""

from __future__ import annotations

from collections.abc import MutableMapping
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")


def exempt_loopback(environ: MutableMapping[str, str]) -> None:
    """Name the loopback addresses in `no_proxy`, for every HTTP client of this process and its children."""
    if not any(environ.get(each) or environ.get(each.upper()) for each in _PROXIES):
        return
    named = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = [host for host in map(str.strip, named.split(",")) if host]
    if "*" in hosts:
        return
    hosts += [host for host in _HOSTS if host not in hosts]
    environ["no_proxy"] = environ["NO_PROXY"] = ",".join(hosts)


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
