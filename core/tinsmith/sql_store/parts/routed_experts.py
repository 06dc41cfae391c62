"""The experts of sampled sequences."""

from collections.abc import Sequence

from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.transactions import routed_experts
from tinsmith.store import RoutedExperts


class SqlRoutedExperts(Connections, RoutedExperts):
    keeps_routed_experts = True

    async def find_routed_experts(self, tenant: str, model_id: str, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        return await self._reader.read(routed_experts.find, tenant, model_id, digests)
