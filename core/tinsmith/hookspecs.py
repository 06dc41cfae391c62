"""Every hook of tinsmith, in lifecycle order.

A plugin is a module named by an entry point of the group `tinsmith`, with functions marked `@tinsmith.hookimpl`. Every
process imports it, so it must not import a framework; `create` functions import theirs in their bodies. Hooks find
things, classes do the work: all work goes through the typed classes that a hook returns.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import typer
    from fastapi import APIRouter

    from tinsmith.backend import AnyBackendSpec, AnySamplerSpec
    from tinsmith.hook_values import (
        LoginSpec,
        OperationFinished,
        Principal,
        RoutesContext,
        ServerStarted,
        ServerStopping,
    )
    from tinsmith.losses import LossSpec
    from tinsmith.scheduler import SchedulerSpec
    from tinsmith.settings import Settings
    from tinsmith.store import StoreSpec, TablesSpec
    from tinsmith.tracer import TracerSpec

PROJECT_NAME = "tinsmith"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


# Registration: once, at start, in every process; cheap, re-entrant ----------------------------------------------------


@hookspec
def tinsmith_register_backends() -> AnyBackendSpec | Sequence[AnyBackendSpec]:
    """Offer training backends. `models[].backend.plugin` selects one. A name that is offered twice is an error."""


@hookspec
def tinsmith_register_samplers() -> AnySamplerSpec | Sequence[AnySamplerSpec]:
    """Offer samplers. `models[].sampler.plugin` selects one. Without that section, the backend samples."""


@hookspec
def tinsmith_register_stores() -> StoreSpec[Any] | Sequence[StoreSpec[Any]]:
    """Offer request stores. `store.plugin` selects one. `create` performs no I/O; `RequestStore.open` does."""


@hookspec
def tinsmith_register_schedulers() -> SchedulerSpec[Any] | Sequence[SchedulerSpec[Any]]:
    """Offer schedulers. `scheduler.plugin` selects one.

    A scheduler keeps no state of its own: it returns whatever it must remember in `Batch.memory`.
    """


@hookspec
def tinsmith_register_losses() -> LossSpec | Sequence[LossSpec]:
    """Offer loss functions. Every backend that lists a name in its capabilities can run that loss.

    `per_token` maps logprobs to losses *and* their derivatives, over any array namespace `xp`. The loss of a request is
    the plain sum.
    """


@hookspec
def tinsmith_register_logins() -> LoginSpec[Any] | Sequence[LoginSpec[Any]]:
    """Offer logins, by which people sign in. `login.plugin` selects one; `tinsmith_register_routes` adds its routes."""


@hookspec
def tinsmith_register_tracers() -> TracerSpec[Any] | Sequence[TracerSpec[Any]]:
    """Offer tracers, which record where requests and operations spend their time. `tracing.plugin` selects one."""


@hookspec
def tinsmith_register_tables() -> TablesSpec | Sequence[TablesSpec]:
    """Offer tables of the package's own in the request store, beside the log's. See `tinsmith.tables`.

    They are made, and migrated, when the store is opened. The name of each begins with the spec's name. Rows that
    belong to a run or a session are deleted with it. Routes and commands read and change them through
    `RequestStore.read` and `RequestStore.write`. The tables of a package that is gone stay in the database.
    """


@hookspec
def tinsmith_register_routes(settings: Settings, context: RoutesContext) -> APIRouter | Sequence[APIRouter]:
    """Offer HTTP routes. Called in the server process only. They are added after core's own routes.

    A route answers a sender without a valid key with a 401, unless its endpoint is marked with `@context.public`. What
    is mounted is always closed. Frontends, form limits and lifespans of a router are not taken over. `context` also
    holds the request store, the registry of `/metrics`, and `caller`, the dependency that says who sent a request.
    Through `context.sampling`, a route samples as the SDK does: by sampling sessions, quotas, queues and the log. A
    router with `route_class=context.json_route` reads JSON as core does, and `context.error_forms` takes the form of
    the errors under a prefix. `context.own_run` returns the caller's run of an id, `context.actor` names the sender for
    the audit log, `context.run_readers` lets others read a run, `context.page_parts` adds to the page. The plugin that
    `login.plugin` names adds the object that knows its users to `context.logins`. A plugin that fails here is logged
    and left out.
    """


@hookspec
def tinsmith_register_commands(group: typer.Typer) -> None:
    """Add commands to the `tinsmith` command line. Called in the CLI process only."""


# Decisions: the first result that is not None wins; core's default is tried last --------------------------------------


@hookspec(firstresult=True)
def tinsmith_authenticate(headers: Mapping[str, str], method: str) -> Principal | None:
    """Return who sent a request, or None if this plugin does not know. Header names are in lower case. Server process.

    `method` is that of HTTP, in upper case; it is empty for a web socket. A plugin that goes by cookies needs it, to
    refuse requests that pages of other sites send.

    `Principal.login` names the session or token, if the plugin learns when it ends: keys and links that the caller
    makes with it end with it.

    Raise `AuthenticationError` to refuse the request without asking other plugins. Any other exception refuses it, too.
    Core's API keys are tried last.
    """


@hookspec(firstresult=True)
def tinsmith_resolve_base_model(name: str) -> Path | None:
    """Find the Hugging Face directory of a base model, or return None if this plugin does not know it.

    `name` is `models[].name`, followed by `@` and `models[].revision` if that is set. Core looks for a directory of
    that name, then in this machine's Hugging Face cache. If nobody finds the model, its engine downloads it from the
    Hugging Face hub.
    """


# Observation: must not block; an exception is logged and dropped ------------------------------------------------------


@hookspec
def tinsmith_server_started(event: ServerStarted) -> None:
    """Run in the server process once it answers requests."""


@hookspec
def tinsmith_operation_finished(event: OperationFinished) -> None:
    """Run in the engine process after an operation's result is durable.

    After a save of an ephemeral snapshot, run once the snapshot has been compared with its model.
    """


@hookspec
def tinsmith_server_stopping(event: ServerStopping) -> None:
    """Run in the server process before it closes."""
