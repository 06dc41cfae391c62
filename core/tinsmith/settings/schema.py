"""Everything that an operator can set. `load_settings` fills it from a file, the environment and flags.

The descriptions become the reference page and the help of flags. The section of a plugin (`store:`, `scheduler:`,
`models[].backend:`, `models[].sampler:`) accepts any key here, and is checked against the plugin's own config class.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    SerializationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from tinsmith.errors import UserError
from tinsmith.settings.data_dir import DataDir
from tinsmith.settings.secrets import Secret, hidden, revealed, shown


def field_of(model: type[BaseModel], key: str) -> FieldInfo:
    """Return the field at a dotted key, such as `server.port`."""
    first, _, rest = key.partition(".")
    field = model.model_fields[first]
    if not rest:
        return field
    assert isinstance(field.annotation, type)
    assert issubclass(field.annotation, BaseModel)
    return field_of(field.annotation, rest)


REVEAL: Final = "reveal secrets"
"""Context of `model_dump` for a file that an engine reads. Without it, sections of plugins show no secret."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class PluginSection(BaseModel):
    """The name of a plugin's offer, and that offer's own settings beside it. Their secrets are hidden: `secrets.py`."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    plugin: str = Field(description="name of the offer to use; `tinsmith plugins` lists the installed ones")

    @model_validator(mode="after")
    def _hide_secrets(self) -> "PluginSection":
        extra = self.__pydantic_extra__ or {}
        extra.update({name: hidden(value, name) for name, value in extra.items()})
        return self

    @model_serializer(mode="plain")
    def _dump(self, info: SerializationInfo) -> dict[str, Any]:
        found: dict[str, Any] = {"plugin": self.plugin, **(self.model_extra or {})}
        if info.exclude_none:
            found = {name: value for name, value in found.items() if value is not None}
        if info.mode != "json":
            return found
        change = revealed if info.context == REVEAL else shown
        return {name: change(value) for name, value in found.items()}

    def options(self) -> dict[str, Any]:
        """Return the settings with their secrets as plain text."""
        return {name: revealed(value) for name, value in (self.model_extra or {}).items()}


class DeviceSettings(_Section):
    """Keys of the `backend:` and `sampler:` sections of all plugins that can be told where to run."""

    devices: int | tuple[str, ...] | None = Field(
        None,
        description="ids of the GPUs to use (for CUDA_VISIBLE_DEVICES), or their number; default: all free ones, "
        "else all, shared",
    )
    memory: ByteSize | None = Field(
        None,
        description="memory to use of each device (on a CPU: of each process), such as `30GiB`; default: the rest",
    )

    @field_validator("devices", mode="before")
    @classmethod
    def _ids_are_text(cls, value: object) -> object:
        if isinstance(value, list | tuple):
            return tuple(str(each) for each in value)
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @field_validator("devices")
    @classmethod
    def _at_least_one(cls, value: int | tuple[str, ...] | None) -> int | tuple[str, ...] | None:
        if value is not None and (value < 1 if isinstance(value, int) else len(set(value)) < max(1, len(value))):
            msg = f"devices is {value!r}; name at least one, each once"
            raise ValueError(msg)
        return value


HASHED: Final = "sha256:"
"""The prefix of a key that is given as its hash."""


class ApiKey(_Section):
    """A key that clients may use."""

    key: Secret = Field(
        description="must start with `tml-`, because the SDK refuses any other key; or `sha256:` and the hash of a key "
        "in hexadecimal digits"
    )
    tenant: str = Field(description="owner of all objects created with this key")
    admin: bool = Field(default=False, description="may read the objects of every tenant and change only its own")

    @property
    def is_hashed(self) -> bool:
        return self.key.get_secret_value().startswith(HASHED)

    @property
    def digest(self) -> str:
        """The SHA-256 of the key, by which it is known in either form."""
        text = self.key.get_secret_value()
        return text.removeprefix(HASHED).lower() if self.is_hashed else digest_of_key(text)


def digest_of_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def repeated_keys(keys: Sequence[ApiKey]) -> list[tuple[int, int]]:
    """Return the positions of the keys that are there before, each after the first position of the same key."""
    first: dict[str, int] = {}
    found = [(first.setdefault(each.digest, index), index) for index, each in enumerate(keys)]
    return [(before, index) for before, index in found if before != index]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySource:
    """The keys as they are configured now, and where they come from."""

    keys: tuple[ApiKey, ...]
    files: tuple[Path, ...] = ()  # a change of which changes the keys
    plain_in: tuple[Path, ...] = ()  # files that hold a key itself, and not only its hash


class LimitsSettings(_Section):
    """Limits of the memory and time for requests and connections."""

    body_bytes: int = Field(
        1 << 30,
        ge=1 << 20,
        description="bytes of unpacked request bodies in memory at a time, of which one tenant may have an eighth; "
        "further ones wait, then get a 429, and the SDK retries",
    )
    connections: int = Field(
        10_000,
        ge=16,
        description="connections open at a time; a new one replaces one without a valid key, or the one idle for "
        "longest, or gets a 503",
    )
    keyless_requests_per_s: float = Field(
        50.0,
        gt=0,
        description="requests per second of all callers without a valid key together, and five times as many at once "
        "after a pause; more get a 429 after some seconds. Wrong links and the description of the API (`/docs`, "
        "`/openapi.json`) count too, whatever key comes with them. Health probes do not count: "
        "beyond 20 per second from one address, they are answered late",
    )
    streams_per_link: int = Field(
        20, ge=1, description="streams of one share link open at a time at each server; more get a 429"
    )
    streams_per_run: int = Field(
        50, ge=1, description="streams of all share links to one run open at a time at each server; more get a 429"
    )
    keyless_streams: int = Field(
        200, ge=1, description="streams of all share links open at a time at each server; more get a 429"
    )


class ServerSettings(_Section):
    host: str = Field(
        "127.0.0.1", description="address to listen on; any other than loopback requires `api_keys` or `login`"
    )
    port: int = Field(8000, ge=0, le=65535, description="TCP port to listen on; 0 picks a free one")
    data_dir: Path = Field(
        Path("~/.tinsmith"),
        description="directory for the database, checkpoints and caches; one server uses it at a time",
    )
    share_data_dir: bool = Field(
        default=False,
        description="let several servers use `data_dir` at once; requires a shared file system and PostgreSQL",
    )
    public_url: str | None = Field(
        None, description="URL under which clients reach the server, for download links; default: `host` and `port`"
    )
    api_keys: tuple[ApiKey, ...] = Field(
        (), description="keys that clients may use; without any, every key that starts with `tml-` is accepted"
    )
    api_keys_file: Path | None = Field(
        None,
        description="YAML file with further keys: a list of entries like those of `api_keys`; a running server "
        "follows its changes, as it does for the configuration file",
    )
    token_lifetime_s: int = Field(
        3600,
        ge=1,
        description="seconds for which a token exchanged for an API key is valid; the SDK renews it halfway through",
    )
    made_key_lifetime_s: float = Field(
        30 * 86400.0,
        gt=0,
        le=366 * 86400,
        description="the longest that an API key lasts which somebody makes over HTTP who has signed in, or is known "
        "by a plugin; keys made with a configured key end with that",
    )
    long_poll_s: float = Field(
        30.0,
        gt=0,
        lt=45,
        description="longest wait in seconds of a request for a result; each waits for a random time of at least "
        "half of it, so that many do not return at once; below 45, when the SDK gives up",
    )
    poll_samples_together: Literal["auto", "always", "never"] = Field(
        "auto",
        description="`always`: one long poll for each sampling client; `never`: one for each sample; `auto`: one for "
        "each client that runs on Python 3.12 or newer (see the protocol page)",
    )
    session_timeout_s: float = Field(
        900.0,
        ge=60,
        description="seconds without a heartbeat after which a session ends; a running client sends one every 10 s",
    )
    gap_timeout_s: float = Field(
        120.0, gt=0, description="seconds for which an operation waits for a missing lower seq_id; then it fails"
    )
    result_retention_s: float = Field(
        3600.0, ge=60, description="least seconds for which results can be read; then they are deleted"
    )
    audit_retention_s: float = Field(
        90 * 86400.0, ge=3600, description="seconds for which the audit log keeps an entry; then it is deleted"
    )
    session_retention_s: float | None = Field(
        30 * 86400.0,
        ge=60,
        description="seconds after its last heartbeat for which an ended session is kept; then it is deleted with "
        "its models and sampling sessions, unless they still have results or checkpoints; `null` keeps all",
    )
    rollout_bytes: int = Field(
        8 << 20,
        ge=0,
        description="bytes of rollouts kept for each run, as long as the run; those of the oldest steps are dropped "
        "first; 0 keeps none",
    )
    max_request_bytes: int = Field(
        64 << 20,
        ge=1 << 20,
        description="size in bytes of the largest accepted request body, packed and unpacked; larger ones get a 413",
    )
    limits: LimitsSettings = LimitsSettings()
    log_level: str = Field(
        "info",
        pattern="^(debug|info|warning|error)$",
        description="least severe messages to log: debug, info, warning or error",
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="form of the log: text, or json, with an object for each line that names tenant, run and request",
    )


class SupervisorSettings(_Section):
    engines: tuple[str, ...] | None = Field(
        None, description="names of the base models whose engines this server starts; default: all; `[]` starts none"
    )
    restart_backoff_s: float = Field(
        1.0,
        gt=0,
        description="seconds before an engine is restarted; the delay doubles until it is ready, up to "
        "`restart_backoff_max_s`",
    )
    restart_backoff_max_s: float = Field(60.0, gt=0, description="longest delay in seconds between two restarts")
    max_restarts: int = Field(
        5,
        ge=0,
        description="consecutive restarts of an engine that crashes before it is ready; after that it has failed",
    )


class RecoverySettings(_Section):
    """The cost of restarting an engine: at most this many operations, or seconds of training, run again."""

    point_every_operations: int = Field(
        50, ge=1, description="operations of a model after which its next recovery point is written"
    )
    point_every_s: float = Field(
        60.0, ge=0, description="seconds after which the next recovery point is written, if this comes first"
    )
    keep_points: int = Field(
        2, ge=1, description="recovery points kept for each model; an older one serves if the newest is damaged"
    )
    waiting_bytes: int = Field(
        4 << 30,
        ge=1,
        description="memory of each engine for training states of adapters waiting for the disk. Recovery points and "
        "saves that do not fit wait until others are written; training continues",
    )
    keep_log_s: float = Field(
        0.0,
        ge=0,
        description="seconds for which a model's whole log is kept after its last request, for `tinsmith replay`; 0 "
        "keeps only what a recovery needs",
    )
    lease_s: float = Field(
        30.0,
        ge=1,
        description="seconds without a renewal in the database after which another engine may take over a base model",
    )
    max_retries: int = Field(
        2,
        ge=1,
        description="retries of an operation after its engine crashed on it; then this operation fails",
    )
    max_interruptions: int = Field(
        20,
        ge=1,
        description="interruptions from outside (`kill -9`, a machine that stops) after which an operation fails, or "
        "an engine that never became ready is no longer restarted",
    )


class WatchdogSettings(_Section):
    """When an engine that lives and does nothing is ended, so that the next one can go on."""

    least_s: float = Field(
        600.0,
        gt=0,
        description="seconds always allowed for a call of a backend or sampler; if a call takes too long, its engine "
        "counts as `silent` after half of the time, and then ends",
    )
    factor: float = Field(
        20.0,
        ge=1,
        description="time limit of a call as a multiple of the slowest calls of its kind and size, if this is more "
        "than `least_s`",
    )
    first_s: float = Field(
        1800.0, gt=0, description="seconds allowed for the first calls of each kind, which may compile"
    )
    most_s: float = Field(
        10_800.0,
        gt=0,
        description="seconds that loading, or any other call, may take without reporting progress; reading or "
        "writing files of more than 10 MB for each of these seconds may take longer",
    )
    lost_s: float = Field(
        300.0,
        gt=0,
        description="seconds after the end of its lease for which an engine may be silent while its supervisor can "
        "write to the database; then the supervisor kills it",
    )


class ConsistencySettings(_Section):
    """For each save for sampling, trainer and sampler score the same probe tokens, and the scores are compared."""

    action: Literal["refuse", "warn", "off"] = Field(
        "refuse",
        description="action for a snapshot that sampler and trainer score differently: `refuse` or `warn`; `off` "
        "compares nothing",
    )
    probes: int = Field(2, ge=1, le=16, description="number of probe sequences to score")
    tokens: int = Field(48, ge=8, le=1024, description="tokens in each probe sequence, at most the context")
    max_difference: float | None = Field(
        None,
        gt=0,
        description="largest accepted difference of any token's logprob, in nats; default: 0.01 if trainer and sampler "
        "both compute in float32, else 1.0",
    )


class TenantQuotas(_Section):
    """The limits of one tenant. `null` is no limit."""

    requests_per_s: float | None = Field(
        1000.0,
        gt=0,
        description="requests per second, counted by each server, and five times as many at once after a pause; more "
        "get a 429, and the SDK retries",
    )
    key_requests_per_s: float | None = Field(
        None, gt=0, description="requests per second with one API key; default: no limit beyond the tenant's"
    )
    requests_in_progress: int | None = Field(
        6000,
        ge=1,
        description="requests that each server answers at a time, long polls included; more get a 429, and the SDK "
        "retries",
    )
    long_polls: int | None = Field(
        5000,
        ge=1,
        description="requests for results waiting at each server at a time; more get a 429, and the SDK retries",
    )
    streams: int | None = Field(
        100,
        ge=1,
        description="runs that streams of the tenant follow at a time at each server, and as many by share links to "
        "its runs; more get a 429",
    )
    pending_operations: int | None = Field(
        20_000, ge=1, description="training requests that may wait; the next ones get a 429, and the SDK retries"
    )
    pending_samples: int | None = Field(
        20_000, ge=1, description="samples that may wait; the next ones get a 429, and the SDK retries"
    )
    queued_bytes: int | None = Field(
        8 << 30, ge=1, description="size in bytes of the requests that may wait; the next ones get a 429"
    )
    live_models: int | None = Field(256, ge=1, description="models in training or waiting for a place; more get a 429")
    sessions: int | None = Field(1000, ge=1, description="sessions that have not ended; more get a 429")
    sampling_sessions: int | None = Field(
        100_000, ge=1, description="sampling sessions (one for each sampling client) in sessions that have not ended"
    )
    api_keys: int | None = Field(100, ge=1, description="API keys made over HTTP; more get a 429")
    checkpoints: int | None = Field(100_000, ge=1, description="stored checkpoints; further saves fail")
    stored_bytes: int | None = Field(
        None, ge=1, description="size in bytes of the stored checkpoints, after which further saves fail; default: none"
    )
    disk_bytes: int | None = Field(
        None,
        ge=1,
        description="size in bytes of all stored data: log and results, checkpoints, sampling snapshots, recovery "
        "points; more gets a 429, and further saves fail; default: a share of the disk, see `disk_share`",
    )
    disk_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="if `disk_bytes` is not set, the tenant's share of its own data and the free space beyond the "
        "reserve together; default: all but 4 GiB or a fifth, whichever is less",
    )


class QuotaSettings(TenantQuotas):
    """The limits of each tenant. The defaults are far above the needs of training."""

    tenants: dict[str, TenantQuotas] = Field(
        default_factory=dict,
        description="limits of single tenants, by name, such as `{ann: {sessions: 5}}`; keys as above; omitted ones "
        "are as for all",
    )
    disk_reserve_bytes: int | None = Field(
        None,
        ge=0,
        description="bytes of the data directory's disk that only heartbeats, results and deletions may use; "
        "everything else gets a 429; default: 1 GiB, or a twentieth of a disk below 20 GiB",
    )
    kept_places: float = Field(
        0.125,
        ge=0,
        lt=1,
        description="share of a base model's places for models (the backend's `max_models`, rounded down) reserved "
        "for tenants without a model",
    )
    place_wait_s: float = Field(
        1800.0, gt=0, description="seconds for which a new model waits for a place on the backend; then it fails"
    )
    place_idle_s: float | None = Field(
        10.0,
        ge=0,
        description="seconds without anything to do after which a model can lose its place to one that waits: its "
        "state goes to disk, and comes back at its next request; `null`: never",
    )

    def kept(self, max_models: int) -> int:
        """Return how many of `places` only tenants without a model may take."""
        return int(max_models * self.kept_places)

    def of(self, tenant: str) -> TenantQuotas:
        """Return the limits of a tenant."""
        own = self.tenants.get(tenant)
        return self if own is None else self.model_copy(update=own.model_dump(exclude_unset=True))


class RoutingReplaySettings(_Section):
    """Train a mixture of experts with the experts that computed its sampled tokens: see `Replay the routing`."""

    enabled: bool = Field(
        default=False,
        description="keep the experts of each sampled token, and train on it with them; needs a backend that replays "
        "them and a sampler that returns them",
    )
    tenant_bytes: int = Field(
        1 << 30,
        ge=1 << 10,
        description="bytes of experts kept for each tenant, as long as results; the oldest sequences are dropped first",
    )


class LossSettings(_Section):
    """What stands in for losses whose objectives are not public."""

    stable_reinforce: str | None = Field(
        None,
        description="the loss that is computed when clients ask for `stable_reinforce`, such as `ppo` or `gspo`; "
        "sessions, results, metrics and the start-up output say so. Default: `stable_reinforce` is refused",
    )
    stable_reinforce_config: dict[str, float] = Field(
        {}, description="its settings, such as `clip_low_threshold`; those without a default are required"
    )
    sequence_lifetime_s: float = Field(
        86400.0,
        ge=60,
        description="seconds for which a sequence sampled with `record_stability_info` can be trained on with "
        "`stable_reinforce`; nothing is stored for it",
    )


class TurnSettings(_Section):
    """Trainer and sampler take turns on the same devices: one sleeps in the memory of the host while the other works.

    See `Use several GPUs`.
    """

    enabled: bool = Field(
        default=False,
        description="let trainer and sampler take turns, so that each may use all memory of the devices; needs a "
        "separate sampler, and plugins that can sleep",
    )
    least_s: float = Field(
        10.0,
        ge=0,
        description="seconds for which the side with the devices starts new work while the other one waits; it then "
        "finishes its running work. A side without work hands over at once",
    )


class ModelSettings(_Section):
    """One base model; each gets an engine process of its own."""

    name: str = Field(description="name that clients pass as `base_model`")
    path: Path | None = Field(
        None,
        description="Hugging Face directory of the model; default: `name`, if that is a directory, else the model of "
        "that name on the Hugging Face hub",
    )
    revision: str | None = Field(None, description="branch, tag or commit on the hub; default: `main`")
    backend: PluginSection | None = Field(
        None, description="name of the backend that trains; default: the installed one, if there is only one"
    )
    sampler: PluginSection | None = Field(
        None, description="name of the sampler; default: the backend that trains also samples"
    )
    resident_snapshots: int = Field(
        256, ge=1, description="sampling snapshots kept in memory; older ones are written to disk"
    )
    resident_snapshot_bytes: int | None = Field(
        None,
        ge=1,
        description="memory for their weights; those used longest ago are written to disk, and read again for the "
        "next sample; default: a quarter of the memory of this machine or container",
    )
    ephemeral_idle_s: float | None = Field(
        None,
        ge=0,
        description="seconds after which an unused ephemeral snapshot is dropped, if another of its model was used "
        "since; later samples from it fail; default: it is kept until its session ends",
    )
    consistency: ConsistencySettings = ConsistencySettings()
    routing_replay: RoutingReplaySettings = RoutingReplaySettings()
    turns: TurnSettings = TurnSettings()
    checkpoint_shard_bytes: int = Field(
        2 << 30,
        ge=1 << 16,
        description="size in bytes of the largest weights file in a checkpoint of full fine-tuning",
    )

    @model_validator(mode="after")
    def _turns_are_of_two(self) -> "ModelSettings":
        if self.turns.enabled and self.sampler is None:
            msg = (
                f"turns of model {self.name!r} are enabled, but it has no `sampler` section: its one backend trains "
                "and samples in the same memory anyway; add a sampler, or disable turns"
            )
            raise ValueError(msg)
        return self

    @property
    def source(self) -> str:
        """Return what to look the model up by if it has no path: NAME, or NAME@REVISION."""
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


class Settings(_Section):
    server: ServerSettings = ServerSettings()
    store: PluginSection = Field(
        PluginSection(plugin="sql"), description="name of the request store; `tinsmith plugins` lists those installed"
    )
    scheduler: PluginSection = Field(
        PluginSection(plugin="fair"), description="name of the scheduler; `tinsmith plugins` lists those installed"
    )
    supervisor: SupervisorSettings = SupervisorSettings()
    recovery: RecoverySettings = RecoverySettings()
    watchdog: WatchdogSettings = WatchdogSettings()
    quotas: QuotaSettings = QuotaSettings()
    losses: LossSettings = LossSettings()
    login: PluginSection | None = Field(
        None,
        description="name of the plugin by which people sign in, such as `oidc`; API keys go on to work, but only "
        "configured ones. Default: API keys alone",
    )
    tracing: PluginSection | None = Field(
        None, description="name of the plugin that records traces of requests and operations, such as `otel`"
    )
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
