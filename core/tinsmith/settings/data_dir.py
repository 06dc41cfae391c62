"""Where everything lies inside the data directory."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class DataDir:
    """The layout of one data directory. Nothing here touches the disk."""

    root: Path

    @classmethod
    def at(cls, path: Path) -> "DataDir":
        """Expand `~` and make the path absolute."""
        return cls(path.expanduser().absolute())

    @property
    def database(self) -> Path:
        """The SQLite file of the request store, unless `store.url` names another database."""
        return self.root / "tinsmith.db"

    @property
    def server_lock(self) -> Path:
        """Locked by the server that uses the directory; contains its process id and URL."""
        return self.root / "server.lock"

    @property
    def scratch_store(self) -> Path:
        """A link to the store of a server with `--store memory`. Once it leads nowhere, what engines keep is stale."""
        return self.root / "in-memory"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of clients, and sampling snapshots."""
        return self.root / "checkpoints"

    @property
    def uploads(self) -> Path:
        """Adapters that clients are uploading."""
        return self.root / "uploads"

    def recovery_points(self, base_model: str) -> Path:
        """The training states from which a restarted engine recovers the models of this base model."""
        return self.root / "recovery" / _file_name(base_model)

    def spilled_snapshots(self, base_model: str) -> Path:
        """Sampling snapshots that no longer fit in the engine's memory."""
        return self.root / "snapshots" / _file_name(base_model)

    def cache(self, plugin: str, base_model: str) -> Path:
        """A plugin's files for a base model that survive restarts, such as compiled programs."""
        return self.root / "cache" / plugin / _file_name(base_model)

    def life_signs(self, base_model: str) -> Path:
        """One locked file for each living engine of this base model."""
        return self.root / "engines" / _file_name(base_model)

    def engine_settings(self, base_model: str, *, server: str = "") -> Path:
        """The settings that a server hands to its engine; `server` tells several servers on one directory apart."""
        own = f"@{server}" if server else ""
        return self.root / "engines" / f"{_file_name(base_model)}{own}.json"


def _file_name(base_model: str) -> str:
    return quote(base_model, safe="")
