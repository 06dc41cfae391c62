"""The output of `tinsmith serve`: its models and URL, how to connect, and the progress of each engine."""

from __future__ import annotations

from importlib.metadata import version

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import NO_SAMPLER
from tinsmith.processes.logs import escape
from tinsmith.settings import ModelSettings, Settings
from tinsmith.store import EngineRecord, EngineState
from tinsmith_checkpoints.huggingface.hub_cache import hub_endpoint


def show_banner(console: Console, settings: Settings, plugins: Plugins, url: str) -> None:
    """Print what is being started, and the two lines of Python that connect to it."""
    grid = Table.grid(padding=(0, 2))
    for model in settings.models:
        grid.add_row("model", f"[bold]{escape(model.name)}[/]")
        grid.add_row("", escape(f"from {_origin(model, plugins)}, {_runs_on(model)}"))
    grid.add_row("store", escape(f"{settings.store.plugin}, data in {settings.server.data_dir}"))
    grid.add_row("keys", _keys(settings))
    grid.add_row("url", f"[bold]{url}[/]   (api docs {url}/docs, readiness {url}/readyz, metrics {url}/metrics)")
    broken = [row.name for row in plugins.report() if row.error]
    if broken:
        grid.add_row("broken", escape(f"plugins {', '.join(broken)}; see `tinsmith plugins`"))
    console.print(f"[bold]tinsmith {version('tinsmith')}[/]")
    console.print(grid)
    console.print("\nConnect:\n")
    for line in connecting_lines(settings, url):
        console.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)
    console.print()


def connecting_lines(settings: Settings, url: str) -> tuple[str, str]:
    """Return two lines of Python that create a training client."""
    needs_key = settings.server.api_keys or settings.login is not None
    key = 'os.environ["TINKER_API_KEY"]' if needs_key else '"tml-local"'
    first = "import os, tinker" if needs_key else "import tinker"
    service = f'tinker.ServiceClient(base_url="{url}", api_key={key})'
    name = settings.models[0].name
    return first, f'client = {service}.create_lora_training_client(base_model="{name}", rank=16).result()'


def _origin(model: ModelSettings, plugins: Plugins) -> str:
    if model.path is not None:
        return str(model.path)
    needed = model.backend is not None and plugins.backends.get(model.backend.plugin).needs_model_path
    return f"{hub_endpoint()}, to be downloaded" if needed else "the backend itself"


def _runs_on(model: ModelSettings) -> str:
    backend = model.backend.plugin if model.backend else "the default backend"
    sampler = ""
    if model.sampler is not None:
        sampler = ", not sampled" if model.sampler.plugin == NO_SAMPLER else f", sampled by {model.sampler.plugin}"
    return f"trained by {backend}{sampler}"


def _keys(settings: Settings) -> str:
    keys = settings.server.api_keys
    if settings.login is not None:
        return f"{len(keys)} configured, and people sign in by {settings.login.plugin}"
    return f"{len(keys)} configured" if keys else "any that starts with tml- (this machine only)"


class EngineDisplay:
    """Shows what engines report: live while something loads or compiles on a terminal, else a line for each stage."""

    def __init__(self, console: Console, base_models: tuple[str, ...]) -> None:
        self._console = console
        self._base_models = base_models
        self._shown: dict[str, str] = {}
        self._live: Live | None = None

    def update(self, records: list[EngineRecord]) -> None:
        """Show the current records."""
        by_model = {record.base_model: record for record in records if record.base_model in self._base_models}
        for name, record in by_model.items():
            # On a terminal, work in progress has live rows of its own; only lasting states are printed as lines.
            line = _reached(record) if self._console.is_terminal else _line(record)
            if line is None or self._shown.get(name) == line.removesuffix(_share(record)):
                continue
            self._console.print(line, highlight=False)
            self._shown[name] = line.removesuffix(_share(record))
        self._update_live([by_model[name] for name in self._base_models if name in by_model])

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _update_live(self, records: list[EngineRecord]) -> None:
        busy = [record for record in records if is_busy(record)]
        if not busy or not self._console.is_terminal:
            self.close()
            return
        rows = Table.grid(padding=(0, 1))
        for record in busy:
            rows.add_row(Spinner("dots"), _line(record))
        if self._live is None:
            self._live = Live(rows, console=self._console, transient=True)
            self._live.start()
        else:
            self._live.update(rows)


def is_busy(record: EngineRecord) -> bool:
    """Return whether an engine is loading, or is ready and still compiling."""
    if record.state in (EngineState.STARTING, EngineState.LOADING, EngineState.RECOVERING):
        return True
    return (
        record.state is EngineState.READY and bool(record.detail) and (record.progress is None or record.progress < 1)
    )


def _reached(record: EngineRecord) -> str | None:
    """Return the line of a state that lasts, or None."""
    match record.state:
        case EngineState.READY:
            return _state(record)
        case EngineState.FAILED | EngineState.RESTARTING | EngineState.SILENT:
            return _line(record)
        case _:
            return None


def _line(record: EngineRecord) -> str:
    if record.state is EngineState.READY and not is_busy(record):
        return _state(record)
    told = record.detail
    if record.failure is not None:  # which the supervisor has logged
        told = told.removeprefix(f"{record.failure.text}; ")
    detail = f": {escape(told)}{_share(record)}" if told else ""
    return f"{_state(record)}{detail}"


def _share(record: EngineRecord) -> str:
    return "" if record.progress is None else f" {record.progress:.0%}"


def _state(record: EngineRecord) -> str:
    colour = {EngineState.READY: "green", EngineState.FAILED: "red", EngineState.RESTARTING: "yellow"}
    colour |= {EngineState.SILENT: "red"}
    device = record.capabilities.trainer.device if record.capabilities and record.state is EngineState.READY else ""
    on = f" on {escape(device)}" if device else ""
    return f"[{colour.get(record.state, 'cyan')}]{record.state}[/] {escape(record.base_model)}{on}"
