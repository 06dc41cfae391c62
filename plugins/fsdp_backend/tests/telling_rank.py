"""A rank that tells what it holds of a fully trained model."""

from collections.abc import Sequence

from tinsmith_fsdp.program import Loaded
from tinsmith_fsdp.rank import Rank
from tinsmith_workers.torch import Piece


class TellingRank(Rank):
    def held(self, model_id: str) -> tuple[Loaded, Sequence[Piece]]:
        model = self._trainer.full[model_id]
        return model.base.loaded(), [piece for shard in model.shards for piece in shard.own_pieces]
