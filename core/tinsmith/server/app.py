"""The HTTP server: parses, checks, authenticates, enqueues, answers. It holds no model and imports no framework."""

import re
import time
from functools import partial
from importlib.metadata import version
from typing import Final

from fastapi import FastAPI, Request
from prometheus_client import Gauge
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith.errors import ConfigError, PluginError
from tinsmith.figures import Figures
from tinsmith.hook_values import Principal, RoutesContext
from tinsmith.plugins.loading import Plugins
from tinsmith.protocol.stable_reinforce import StandIn
from tinsmith.server import error_answers
from tinsmith.server.api_keys import ApiKeys, KeyTokens, credential_of
from tinsmith.server.auth import identified, identified_by
from tinsmith.server.context import Engines, Metrics, ServerContext
from tinsmith.server.descriptions import add_descriptions
from tinsmith.server.download_links import has_signature
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.limits.admission import Admission
from tinsmith.server.limits.bodies import BodyLimit, BodyLimits
from tinsmith.server.limits.body_budget import BodyBudget
from tinsmith.server.limits.bounded_http import Connections
from tinsmith.server.limits.gate import Gate, names_of
from tinsmith.server.limits.quotas import Quotas
from tinsmith.server.limits.strangers import Strangers
from tinsmith.server.live_keys import LiveKeys
from tinsmith.server.plugin_routes import StaticPaths, plugin_routes
from tinsmith.server.route_sampling import TenantSampling
from tinsmith.server.routes import (
    engines,
    futures,
    metrics,
    not_offered,
    runs,
    sampling,
    service,
    sessions,
    training,
    usage,
    weights,
)
from tinsmith.server.signed_urls import UrlSigner
from tinsmith.settings import KeySource, Settings
from tinsmith.store import RequestStore
from tinsmith.store.disk_room import reserve_bytes, space_at

# Each request looks for its route in this order, so those that are asked for most come first.
_ROUTERS = (futures, training, sampling, weights, sessions, service, not_offered, runs, metrics, engines, usage)

_REQUEST_ID: Final = b"x-request-id"
_SOUND_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


async def create_app(
    settings: Settings,
    *,
    store: RequestStore,
    plugins: Plugins,
    keys: LiveKeys | None = None,
    figures: Figures | None = None,
) -> FastAPI:
    """Build the app on an open store. It opens and closes nothing that it was given.

    `keys`: API keys that follow their files; default: a fixed set from the settings. Each app needs its own plugins,
    because its keys become one of them. Raises PluginError if two plugins offer a loss of one name.
    `figures`: those of this process, which the store counts in, too.
    """
    app = FastAPI(title="tinsmith", version=version("tinsmith"), openapi_url=None)
    if settings.server.api_keys_file is not None and keys is None:
        msg = "server.api_keys_file has not been read; load the settings with load_settings, or pass its keys"
        raise ConfigError(msg)
    tokens = KeyTokens(await store.secret("key tokens"), settings.server.token_lifetime_s)
    api_keys = ApiKeys(keys or LiveKeys(KeySource(keys=settings.server.api_keys)), tokens)
    _add_api_keys(plugins, api_keys)
    context = ServerContext(
        settings=settings,
        store=store,
        plugins=plugins,
        api_keys=api_keys,
        losses=plugins.losses.all(),
        stand_in=StandIn.of(settings.losses, plugins.losses.all()),
        signer=UrlSigner(await store.secret("download links")),
        engines=Engines(store),
        figures=figures or Figures(),
        quotas=Quotas(store, settings.quotas, read_space=partial(space_at, settings.data_dir.root)),
    )
    _show_space(context.metrics, settings)
    app.state.context = context
    app.state.connections = Connections(settings.server.limits.connections)
    routes_context = _routes_context(context)
    for router in (*(module.router for module in _ROUTERS), runs.files_router, service.open_router):
        app.router.routes.extend(router.routes)  # a router that is included hides its routes from a look-up by path
    for router in plugins.routes(settings, routes_context):
        app.router.routes.extend(plugin_routes(router, routes_context, plugins))
    add_descriptions(app)
    app.router.routes.insert(0, StaticPaths(app.router.routes))
    error_answers.install(app)
    bounds, asks_plugins = settings.server.limits, plugins.authenticators() != [api_keys]
    identify = partial(identified, plugins=plugins) if asks_plugins else partial(_identified_by_key, api_keys)
    strangers = Strangers(per_s=bounds.keyless_requests_per_s)
    app.add_middleware(
        BodyLimit,
        limits=BodyLimits(data_bytes=settings.server.max_request_bytes),
        budget=BodyBudget(total_bytes=bounds.body_bytes),
        heavy=context.heavy,
        authenticate=identify,
    )
    app.add_middleware(
        Admission,
        quotas=context.quotas,
        identify=identify,
        key_id=api_keys.id_used,
        strangers=strangers,
        has_link=partial(has_signature, context),
        in_thread=asks_plugins,
    )
    app.add_middleware(Gate, names=names_of(settings.server), strangers=strangers)
    app.add_middleware(_Measured, metrics=context.metrics)
    return app


def _show_space(metrics: Metrics, settings: Settings) -> None:
    """Let `/metrics` ask the disk."""
    read, quotas = partial(space_at, settings.data_dir.root), settings.quotas
    free = Gauge("tinsmith_disk_free_bytes", "free bytes of the data directory's disk", registry=metrics.registry)
    free.set_function(lambda: read().free_bytes)
    reserve = Gauge(
        "tinsmith_disk_reserve_bytes",
        "of these, bytes that only heartbeats, results and deletions may use",
        registry=metrics.registry,
    )
    reserve.set_function(lambda: reserve_bytes(quotas, read()))


def _identified_by_key(api_keys: ApiKeys, scope: Scope) -> Principal:
    """As `identified` where no plugin is asked: calling a hook takes longer than looking a key up."""
    return identified_by(scope, lambda: api_keys.principal(credential_of(Headers(scope=scope))))


def _routes_context(context: ServerContext) -> RoutesContext:
    def caller(request: Request) -> Principal:
        return identified(request.scope, context.plugins)

    return RoutesContext(
        store=context.store,
        registry=context.metrics.registry,
        sampling=TenantSampling(context),
        pending=context.backlog.list,
        figures=context.figures,
        caller=caller,
        json_route=JsonRoute,
        error_forms=context.error_forms,
    )


def _add_api_keys(plugins: Plugins, api_keys: ApiKeys) -> None:
    """Registering a plugin never raises, but without its keys the server must not start."""
    name = "configured_api_keys"
    plugins.add(api_keys, name)
    for row in plugins.report():
        if row.name == name and row.error is not None:
            raise PluginError(row.error)


def begin_shutdown(app: FastAPI) -> None:
    """End all long polls now, so that the server can stop without waiting for them. Call this on the event loop."""
    context: ServerContext = app.state.context
    context.stopping.set()


class _Measured:
    """ASGI middleware that counts and times the answers of each route, and repeats the id that a request came with."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
                if _SOUND_ID.fullmatch(given):
                    message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, given)]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "(none)")
            self._metrics.requests.labels(route=route, status=status).inc()
            self._metrics.seconds.labels(route=route).observe(time.perf_counter() - started)
