"""Everything an operator can set. `load_settings` (settings_loading.py) reads file, environment and flags into it.

A plugin's own section (`store:`, `scheduler:`, `models[].backend:`, `models[].sampler:`) stays open here and is checked
against the config class that the plugin registers.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic.fields import FieldInfo

from tinsmith.errors import UserError
from tinsmith.settings.data_dir import DataDir


def field_of(model: type[BaseModel], key: str) -> FieldInfo:
    """Return the field at a dotted key, such as `server.port`."""
    first, _, rest = key.partition(".")
    field = model.model_fields[first]
    if not rest:
        return field
    assert isinstance(field.annotation, type)
    assert issubclass(field.annotation, BaseModel)
    return field_of(field.annotation, rest)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PluginSection(BaseModel):
    """The name of a plugin's offer, and that offer's own settings beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    plugin: str = Field(description="the name of what a plugin offers; `tinsmith plugins` lists them")

    def options(self) -> dict[str, Any]:  # Any: checked by the plugin's config class
        return dict(self.model_extra or {})


class ApiKey(_Section):
    """A key that clients may use. Keys start with `tml-`, or the SDK refuses them."""

    key: SecretStr = Field(description="starts with `tml-`")
    tenant: str = Field(description="who owns what is made with this key")
    admin: bool = Field(default=False, description="may read the objects of every tenant and change only its own")


class ServerSettings(_Section):
    host: str = Field("127.0.0.1", description="address to listen on; other than loopback needs `api_keys`")
    port: int = Field(8000, ge=0, le=65535, description="0 picks a free one")
    data_dir: Path = Field(Path("~/.tinsmith"), description="database, checkpoints and caches; one server each")
    share_data_dir: bool = Field(
        default=False, description="several servers use `data_dir` at once, over a shared file system; needs PostgreSQL"
    )
    public_url: str | None = Field(None, description="where clients reach the server; for download links")
    api_keys: tuple[ApiKey, ...] = Field((), description="empty: on loopback any key that starts with tml-")
    token_lifetime_s: int = Field(
        3600, ge=1, description="how long a token lasts that stands for an API key; the SDK renews it at half of that"
    )
    long_poll_s: float = Field(30.0, gt=0, lt=45, description="the SDK gives up at 45 s")
    poll_samples_together: Literal["auto", "always", "never"] = Field(
        "auto",
        description="one long poll per sampling client instead of one per sample; auto: where the client's Python is "
        "3.12 or newer, see the protocol page",
    )
    session_timeout_s: float = Field(
        900.0, ge=60, description="heartbeats come every 10 s while the client's loop runs"
    )
    gap_timeout_s: float = Field(120.0, gt=0, description="how long operations wait for a missing lower seq_id")
    result_retention_s: float = Field(3600.0, ge=60, description="results stay readable at least that long")
    max_request_bytes: int = Field(256 << 20, ge=1 << 20, description="a larger body gets a 413")
    max_pending_per_tenant: int = Field(20_000, ge=1, description="more samples than this get a 429")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")


class SupervisorSettings(_Section):
    engines: tuple[str, ...] | None = Field(
        None, description="names of the models whose engines this server starts; default: all; `[]`: none"
    )
    restart_backoff_s: float = Field(
        1.0, gt=0, description="before an engine is restarted; doubles up to restart_backoff_max_s"
    )
    restart_backoff_max_s: float = Field(60.0, gt=0, description="the longest wait between restarts")
    max_restarts: int = Field(
        5, ge=0, description="of an engine that ends before it is ready, in a row; then it is failed"
    )


class RecoverySettings(_Section):
    """What a restart of an engine costs: at most so many operations, or seconds of training, are run once more."""

    point_every_operations: int = Field(50, ge=1, description="of a model, until its training state is written again")
    point_every_s: float = Field(60.0, ge=0, description="or so long after the last time, whichever comes first")
    keep_points: int = Field(2, ge=1, description="of each model; the older ones are for a damaged newest")
    keep_log_s: float = Field(
        0.0,
        ge=0,
        description="a model's log stays from its creation on, until so long after its last request: for `tinsmith "
        "replay`; 0: only what a recovery needs",
    )
    lease_s: float = Field(
        30.0, ge=1, description="another engine may take over from one that the database has not heard of for so long"
    )
    max_retries: int = Field(2, ge=1, description="of an operation that its engine crashed on; then it fails alone")
    max_interruptions: int = Field(
        20,
        ge=1,
        description="of an operation, or of an engine's start, by a death from outside (kill -9, a machine that "
        "stops); then as if it had crashed too often",
    )


class ConsistencySettings(_Section):
    """Each save for sampling scores the same probe tokens in trainer and sampler, and compares."""

    action: Literal["refuse", "warn", "off"] = Field(
        "refuse", description="what happens to a save whose sampler does not score what the trainer scores"
    )
    probes: int = Field(2, ge=1, le=16, description="sequences that are scored")
    tokens: int = Field(48, ge=8, le=1024, description="of each, or as many as the context holds")
    max_difference: float | None = Field(
        None, gt=0, description="of any token's logprob; default 0.01 where both compute in float32, else 1.0"
    )


class ModelSettings(_Section):
    """One base model; each gets an engine process of its own."""

    name: str = Field(description="what clients pass as base_model")
    path: Path | None = Field(None, description="a Hugging Face directory; default: `name` if it is one")
    backend: PluginSection | None = Field(None, description="default: the installed backend, if there is just one")
    sampler: PluginSection | None = Field(None, description="default: the backend samples itself")
    resident_snapshots: int = Field(256, ge=1, description="sampling snapshots kept in memory; older ones go to disk")
    consistency: ConsistencySettings = ConsistencySettings()
    checkpoint_shard_bytes: int = Field(
        2 << 30, ge=1 << 16, description="greatest size of one weights file in checkpoints of full fine-tuning"
    )


class Settings(_Section):
    server: ServerSettings = ServerSettings()
    store: PluginSection = PluginSection(plugin="sql")
    scheduler: PluginSection = PluginSection(plugin="fair")
    supervisor: SupervisorSettings = SupervisorSettings()
    recovery: RecoverySettings = RecoverySettings()
    models: tuple[ModelSettings, ...] = ()

    @field_validator("models")
    @classmethod
    def _names_are_unique(cls, models: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
        names = [model.name for model in models]
        for name in names:
            if names.count(name) > 1:
                msg = f"the name {name!r} occurs {names.count(name)} times; each base model needs its own"
                raise ValueError(msg)
        return models

    @property
    def data_dir(self) -> DataDir:
        """The layout of `server.data_dir`."""
        return DataDir.at(self.server.data_dir)

    def model(self, name: str) -> ModelSettings:
        """Return the base model of that name. Raise UserError if there is none."""
        for model in self.models:
            if model.name == name:
                return model
        configured = ", ".join(repr(model.name) for model in self.models) or "none"
        msg = f"no base model named {name[:200]!r}; available: {configured}"
        raise UserError(msg)
