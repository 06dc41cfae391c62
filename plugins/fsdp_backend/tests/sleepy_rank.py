"""A rank that counts what FSDP2 holds of the frozen model, apart from the trainer's own account."""

from typing import Any

from torch.distributed.fsdp import FSDPModule

from tinsmith_fsdp.rank import Rank


class SleepyRank(Rank):
    def held_by_fsdp(self) -> dict[str, int]:
        """Return the bytes of its shards and of what it has gathered."""
        held = {"shards": 0, "gathered": 0}
        assert self._trainer is not None
        for module in self._trainer.base.model.modules():
            for each in _parameters(module):
                held["shards"] += each._sharded_param_data.untyped_storage().nbytes()  # noqa: SLF001 - torch says nowhere else what FSDP holds
                gathered = getattr(each, "_unsharded_param", None)
                held["gathered"] += 0 if gathered is None else gathered.untyped_storage().nbytes()
        return held


def _parameters(module: Any) -> list[Any]:
    if not isinstance(module, FSDPModule):
        return []
    group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001 - as above
    return [] if group is None else list(group.fsdp_params)
