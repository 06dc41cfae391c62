"""The HTTP server: parses, checks, authenticates, enqueues, answers. It holds no model and imports no framework."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI, Request

from tinsmith.errors import ConfigError, PluginError, TinsmithError
from tinsmith.figures import Figures
from tinsmith.hook_values import Principal, RoutesContext
from tinsmith.plugins.loading import Plugins
from tinsmith.protocol.stable_reinforce import StandIn
from tinsmith.server import error_answers
from tinsmith.server.api_keys import ApiKeys, KeyTokens
from tinsmith.server.auth import actor_of, caller_of, identified, own_run
from tinsmith.server.context import API_PREFIX, ServerContext
from tinsmith.server.descriptions import DESCRIPTIONS, add_descriptions
from tinsmith.server.issued_keys import IssuedKeys, find_usable
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.kept import Engines
from tinsmith.server.limits.bodies import Bodies, BodyLimits
from tinsmith.server.limits.body_budget import BodyBudget
from tinsmith.server.limits.bounded_http import Connections
from tinsmith.server.limits.edge import Edge, Identify, Limit, Rates
from tinsmith.server.limits.gate import Gate, names_of
from tinsmith.server.limits.probes import Probes
from tinsmith.server.limits.quotas import Quotas
from tinsmith.server.limits.strangers import Strangers
from tinsmith.server.live_keys import LiveKeys
from tinsmith.server.metrics import Measured, show_space
from tinsmith.server.plugin_routes import StaticPaths, plugin_routes
from tinsmith.server.route_sampling import TenantSampling
from tinsmith.server.routes import api_keys as api_key_routes
from tinsmith.server.routes import (
    audit,
    copies,
    disk,
    downloads,
    engines,
    futures,
    metrics,
    rollouts,
    runs,
    sampling,
    searches,
    service,
    sessions,
    traces,
    training,
    uploads,
    weights,
)
from tinsmith.server.safe_headers import SafeHeaders
from tinsmith.server.sequence_ids import SequenceIds
from tinsmith.server.signed_urls import UrlSigner
from tinsmith.settings import KeySource, Settings
from tinsmith.store import AuditEntry, RequestStore
from tinsmith.store.disk_room import space_at
from tinsmith.store.logins import has_ended
from tinsmith.tracer import Tracer

_log = logging.getLogger(__name__)

# Each request looks for its route in this order, so those that are asked for most come first.
_ROUTERS = (
    *(futures, training, sampling, weights, sessions, service, runs, downloads),
    *(copies, uploads, searches, metrics, rollouts, engines, disk, traces, api_key_routes, audit),
)


async def create_app(
    settings: Settings,
    *,
    store: RequestStore,
    plugins: Plugins,
    keys: LiveKeys | None = None,
    figures: Figures | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Build the app on an open store. It opens and closes nothing that it was given.

    `keys`: API keys that follow their files; default: a fixed set from the settings. Each app needs its own plugins,
    because its keys become one of them. Raises PluginError if two plugins offer a loss of one name.
    `figures`: this process's, which the store counts in, too. `tracer`: is told of each request.
    """
    app = FastAPI(title="tinsmith", version=version("tinsmith"), openapi_url=None)
    if settings.server.api_keys_file is not None and keys is None:
        msg = "server.api_keys_file has not been read; load the settings with load_settings, or pass its keys"
        raise ConfigError(msg)
    tokens = KeyTokens(await store.secret("key tokens"), settings.server.token_lifetime_s)
    live_keys = keys or LiveKeys(KeySource(keys=settings.server.api_keys))
    longest = timedelta(seconds=settings.server.made_key_lifetime_s)
    issued = IssuedKeys(partial(find_usable, store, longest))
    api_keys = ApiKeys(
        live_keys, tokens, issued=issued, required=settings.login is not None, has_ended=partial(has_ended, store)
    )
    _add_api_keys(plugins, api_keys)
    context = ServerContext(
        settings=settings,
        store=store,
        plugins=plugins,
        api_keys=api_keys,
        losses=plugins.losses.all(),
        stand_in=StandIn.of(settings.losses, plugins.losses.all()),
        signer=UrlSigner(await store.secret("download links")),
        sequence_ids=SequenceIds(await store.secret("sequence ids"), settings.losses.sequence_lifetime_s),
        engines=Engines(store),
        figures=figures or Figures(),
        quotas=Quotas(store, settings.quotas, read_space=partial(space_at, settings.data_dir.root)),
    )
    show_space(context.metrics, settings)
    app.state.context = context
    app.state.connections = Connections(settings.server.limits.connections)
    identify = partial(identified, context=context)
    routes_context = _routes_context(context, identify, issued, await store.secret("plugins"))
    open_routers = (downloads.open_router, uploads.open_router, traces.open_router, service.open_router)
    for router in (*(module.router for module in _ROUTERS), *open_routers):
        app.router.routes.extend(router.routes)  # a router that is included hides its routes from a look-up by path
    for router in plugins.routes(settings, routes_context):
        app.router.routes.extend(plugin_routes(router, routes_context.is_public, identify))
    _add_logins(settings, plugins, routes_context.logins)
    context.asks_plugins = plugins.authenticators() != [api_keys]
    add_descriptions(app, settings.server.public_url)
    app.router.routes.insert(0, StaticPaths(app.router.routes))
    error_answers.install(app)
    bounds = settings.server.limits
    look_up = partial(_look_up, api_keys, routes_context.look_ups)
    strangers = Strangers(
        per_s=bounds.keyless_requests_per_s,
        identify=identify,
        look_up=look_up,
        in_thread=context.asks_plugins,
        opens=partial(_opens, context),
    )
    limits: tuple[Limit, ...] = (  # each request passes them in this order
        Gate(names=names_of(settings), strangers=strangers),
        Probes(),
        strangers,
        Rates(context.quotas, api_keys.id_used),
        Bodies(
            limits=BodyLimits(data_bytes=settings.server.max_request_bytes),
            budget=BodyBudget(total_bytes=bounds.body_bytes),
            heavy=context.heavy,
            identify=identify,
            look_up=look_up,
        ),
    )
    app.add_middleware(Edge, limits=limits)
    app.add_middleware(
        Measured,
        metrics=context.metrics,
        refusal_log=context.refusal_log,
        audit=partial(_note_refused, context),
        tracer=tracer,
    )
    _wrap(app)
    return app


def _wrap(app: FastAPI) -> None:
    """Put the headers around everything: what `add_middleware` adds does not see answers to unexpected errors."""
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: SafeHeaders(build())  # type: ignore[method-assign]


def _opens(context: ServerContext, path: str) -> bool | None:
    """Return whether a signed link in a path is right; also False for what is the same for everybody."""
    if path in DESCRIPTIONS:
        return False
    return context.signer.is_link(path.removeprefix(f"{API_PREFIX}/"), context.now())


async def _look_up(
    api_keys: ApiKeys,
    more: Sequence[Callable[[Mapping[str, str]], Awaitable[None]]],
    headers: Mapping[str, str],
    *,
    unknown: bool = True,
) -> None:
    """Prepare for identifying the sender of a request, by its key and by what plugins know."""
    await api_keys.look_up(headers, unknown=unknown)
    for each in more:
        await each(headers)


async def _note_refused(context: ServerContext, what: str) -> None:
    entry = AuditEntry(at=context.now(), tenant="", event="access_refuse", details={"request": what})
    try:
        await context.store.add_audit_entry(entry)
    except TinsmithError as error:
        _log.warning("the audit log does not have a refused %s: %s", what, error)


def _routes_context(context: ServerContext, identify: Identify, issued: IssuedKeys, secret: bytes) -> RoutesContext:
    def caller(request: Request) -> Principal:  # a dependency, of which FastAPI reads the types
        return identify(request.scope)

    async def actor(request: Request) -> Mapping[str, str]:
        return await actor_of(request, await caller_of(request, context), context)

    return RoutesContext(
        store=context.store,
        registry=context.metrics.registry,
        sampling=TenantSampling(context),
        pending=context.backlog.get,
        figures=context.figures,
        caller=caller,
        json_route=JsonRoute,
        secret=secret,
        logins_ended=issued.look_again,
        error_forms=context.error_forms,
        own_run=partial(own_run, context),
        actor=actor,
        run_readers=context.run_readers,
        large_answer=context.large_answers.build,
        disk_uses=context.quotas.disk.uses,
    )


def _add_api_keys(plugins: Plugins, api_keys: ApiKeys) -> None:
    """Registering a plugin never raises, but without its keys the server must not start."""
    name = "configured_api_keys"
    plugins.add(api_keys, name)
    for row in plugins.report():
        if row.name == name and row.error is not None:
            raise PluginError(row.error)


def _add_logins(settings: Settings, plugins: Plugins, logins: Sequence[object]) -> None:
    """Raise PluginError if the configured plugin offers no login: without one, the server must not start."""
    if settings.login is None:
        return
    name = settings.login.plugin
    for login in logins:
        plugins.add(login, f"login by {name}")
    failed = next((row.error for row in plugins.report() if row.name in {name, f"login by {name}"} and row.error), None)
    if failed is not None or not logins:
        raise PluginError(failed or f"login.plugin: no installed plugin named {name!r} offers a login; install it")


def begin_shutdown(app: FastAPI) -> None:
    """End all long polls now, so that the server can stop without waiting for them. Call this on the event loop."""
    context: ServerContext = app.state.context
    context.stopping.set()
