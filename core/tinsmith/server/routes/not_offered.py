"""Endpoints that the SDK has and this server refuses, each with its reason and what to do instead."""

from collections.abc import Callable

from fastapi import APIRouter

from tinsmith.errors import UnsupportedError
from tinsmith.server.auth import Caller
from tinsmith.server.context import API_PREFIX

router = APIRouter(prefix=API_PREFIX, tags=["not offered"])

_REASONS = {
    ("POST", "/copy_weights"): "publish the checkpoint, or load it and save it again",
    ("POST", "/create_custom_loss"): "use forward_backward_custom, which runs the loss in the client",
    ("POST", "/forward"): "use tinker 0.25 or newer, which sends forward passes to forward_backward",
    ("POST", "/sessions/search"): "list sessions instead",
    ("DELETE", "/auth/apikey/me"): "API keys are part of the server's configuration (server.api_keys); remove it there",
    ("GET", "/audit"): "no audit log is kept",
}


def _refusal(path: str, reason: str) -> Callable[[Caller], None]:
    def refuse(caller: Caller) -> None:
        del caller
        msg = f"{path} is not offered by this server: {reason}"
        raise UnsupportedError(msg)

    return refuse


for (_method, _path), _reason in _REASONS.items():
    router.add_api_route(_path, _refusal(_path, _reason), methods=[_method], summary=f"Not offered: {_reason}")
