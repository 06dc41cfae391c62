"""The launcher `ray`: an actor for each worker. Ray chooses machines and GPUs, and ends the actors with the engine."""

import os
from collections.abc import Mapping
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tinsmith.errors import ConfigError
from tinsmith_workers.config import WorkersConfig
from tinsmith_workers.launching import ALLOCATOR, COORDINATOR, KEY, Launch, worker_environment

# Any below: Ray creates the types of actor handles and references at run time.

_CPU_EACH: Final = 1.0
_AUTH_MODE: Final = "RAY_AUTH_MODE"
_NO_TOKENS: Final = (
    f"the Ray cluster asks for no token, so anyone who reaches it can run code: set {_AUTH_MODE}=token and the same "
    "RAY_AUTH_TOKEN for `ray start` on each machine and for the server"
)
_NO_CLUSTER: Final = (
    "the launcher is ray, and neither ray_address nor RAY_ADDRESS names a cluster: name one (`auto` is that of this "
    "machine), or choose the launcher `local`, which does the same on one machine"
)


class _Actor:
    """Its work returns when the engine ends the worker, and exits by os._exit when the engine is gone."""

    def asks_for_a_token(self) -> bool:
        return os.environ.get(_AUTH_MODE) == "token"  # as set by whatever started Ray on this machine

    def work(self, key: str, num_workers: int) -> None:
        from tinsmith_workers.serving import serve  # on the actor's machine

        serve(os.environ[COORDINATOR], key.encode(), num_workers=num_workers)


class RayActors:
    """One placement group, with a bundle for each machine."""

    def __init__(self, launch: Launch) -> None:
        _join_cluster(launch)
        _refuse_if_unreachable(launch)
        gpus = _gpus_per_node()
        if launch.gpus and not gpus:
            msg = "no machine of the Ray cluster has a GPU; see `ray status`, or set the backend's device to cpu"
            raise ConfigError(msg)
        on_gpus = gpus > 0 and launch.gpus is not False
        per_node = launch.config.nproc_per_node or (gpus if on_gpus else launch.per_node)
        self.num_workers: int | None = launch.config.nnodes * per_node
        each = {"CPU": _CPU_EACH, **({"GPU": 1.0} if on_gpus else {})}
        self._group: PlacementGroup = _room(launch.config, {name: per_node * number for name, number in each.items()})
        environment = {**worker_environment(_allocator()), "PYTHONSAFEPATH": "1", **launch.environment}
        key = environment.pop(KEY)  # the environment of actors is shown by Ray's tools; arguments are not
        actor = ray.remote(_Actor)
        self._actors: list[Any] = [
            actor.options(
                num_cpus=_CPU_EACH,
                num_gpus=each.get("GPU", 0),
                max_restarts=0,
                runtime_env={"env_vars": environment},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, node),
            ).remote()
            for node in range(launch.config.nnodes)
            for _ in range(per_node)
        ]
        self._refuse_without_tokens(launch.config.start_timeout_s)
        self._running: list[Any] = [each.work.remote(key, self.num_workers) for each in self._actors]

    def _refuse_without_tokens(self, timeout_s: float) -> None:
        """Strangers who reach a cluster that asks for none run code on it, without the workers' key."""
        try:
            asking = ray.get([each.asks_for_a_token.remote() for each in self._actors], timeout=timeout_s)
        except RayError as error:
            self.close()
            first, *_ = str(error).splitlines()
            msg = f"Ray did not run the workers; do all its machines have the same {_AUTH_MODE}, and tinsmith? {first}"
            raise ConfigError(msg) from error
        if not all(asking):
            self.close()
            raise ConfigError(_NO_TOKENS)

    def ended(self) -> str | None:
        done, _ = ray.wait(self._running, timeout=0)
        return "a worker's actor ended" if done else None

    def close(self) -> None:
        for each in self._actors:
            ray.kill(each)
        remove_placement_group(self._group)


def _allocator() -> dict[str, str]:
    """Return what the operator has set on this machine."""
    return {name: os.environ[name] for name in ALLOCATOR if name in os.environ}


def _join_cluster(launch: Launch) -> None:
    if not ray.is_initialized():
        address = launch.config.ray_address or os.environ.get("RAY_ADDRESS")
        if address is None:
            raise ConfigError(_NO_CLUSTER)
        empty = launch.directory / "ray"
        empty.mkdir()
        try:  # without a working directory, workers would import from the current one
            ray.init(address=address, log_to_driver=True, runtime_env={"working_dir": str(empty)})
        except ConnectionError as error:
            msg = f"no Ray cluster at ray_address {address!r}, or RAY_AUTH_TOKEN is not its token: {error}"
            raise ConfigError(msg) from error
    if os.environ.get(_AUTH_MODE) != "token":
        raise ConfigError(_NO_TOKENS)


def _gpus_per_node() -> int:
    """Return how many GPUs each machine has that has any: of unequal machines, the smallest number. 0: none has."""
    found = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return min((number for number in found if number), default=0)


def _refuse_if_unreachable(launch: Launch) -> None:
    if launch.environment[COORDINATOR].startswith("unix:") and sum(node["Alive"] for node in ray.nodes()) > 1:
        msg = (
            "the Ray cluster has several machines, and may place workers on any: set control_address to host:port of "
            "this machine, as the others reach it"
        )
        raise ConfigError(msg)


def _room(config: WorkersConfig, bundle: Mapping[str, float]) -> PlacementGroup:
    strategy = "STRICT_SPREAD" if config.nnodes > 1 else "STRICT_PACK"
    group = placement_group([dict(bundle)] * config.nnodes, strategy=strategy)
    if not group.wait(config.start_timeout_s):
        remove_placement_group(group)
        msg = f"Ray has no room for {dict(bundle)} on each of {config.nnodes} machines; see `ray status`"
        raise ConfigError(msg)
    return group
