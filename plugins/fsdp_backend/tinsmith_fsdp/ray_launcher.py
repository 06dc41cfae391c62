"""Ranks as Ray actors: Ray assigns machines and GPUs, and ends the ranks with the engine. Needs the extra `ray`."""

import os
import socket
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from tinsmith import ConfigError
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.environment import CONTROL, KEY

# Any below: Ray creates the types of actor handles and references at run time.


class _Rank:
    """The actor of one rank. It returns when the engine ends it, and exits by os._exit when the engine is gone."""

    def meeting_point(self) -> tuple[str, int]:
        with socket.create_server(("", 0)) as free:
            return str(ray.util.get_node_ip_address()), free.getsockname()[1]

    def serve(self, environment: dict[str, str]) -> None:
        from tinsmith_fsdp.rank import serve  # imports torch, on the actor's machine

        os.environ.update(environment)
        serve(environment[CONTROL], environment[KEY].encode())


class RayLauncher:
    """Starts one actor per rank in one placement group, packed onto as few machines as possible."""

    def __init__(self, config: FsdpConfig, environment: Mapping[str, str]) -> None:
        if not ray.is_initialized():
            try:
                ray.init(address=config.ray_address, log_to_driver=True, include_dashboard=False)
            except ConnectionError as error:
                msg = f"no Ray cluster at ray_address {config.ray_address!r}: {error}"
                raise ConfigError(msg) from error
        world_size = config.nnodes * (config.nproc_per_node or 1)
        gpus = 0 if config.device == "cpu" else 1
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if gpus else {})}
        self._group: PlacementGroup = placement_group([bundle] * world_size, strategy="PACK")
        if not self._group.wait(config.start_timeout_s):
            remove_placement_group(self._group)
            msg = f"Ray has no room for {world_size} ranks of {bundle}; see `ray status`"
            raise ConfigError(msg)
        actor = ray.remote(_Rank)
        self._actors: list[Any] = [
            actor.options(num_cpus=1, num_gpus=gpus, max_restarts=0, **self._place(index)).remote()
            for index in range(world_size)
        ]
        host, port = ray.get(self._actors[0].meeting_point.remote())
        shared = {**environment, "MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
        self._running: list[Any] = [
            each.serve.remote({**shared, "RANK": str(index), "LOCAL_RANK": "0"})
            for index, each in enumerate(self._actors)
        ]

    def _place(self, index: int) -> dict[str, Any]:
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, index)
        return {"scheduling_strategy": strategy}

    def ended(self) -> str | None:
        done, _ = ray.wait(self._running, timeout=0)
        return "a rank's actor ended" if done else None

    def close(self) -> None:
        for each in self._actors:
            ray.kill(each)
        remove_placement_group(self._group)
