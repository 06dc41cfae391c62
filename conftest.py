"""Which process runs which test, in what order, and what `make test` leaves to `make test-all`."""

import ast
import gc
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["surroundings"]  # sets right what a terminal hands down, and finds what tests leave

_ROOT = Path(__file__).parent
_PLUGINS = _ROOT / "plugins"
_JAX_OUTSIDE_ITS_PLUGIN = (
    *(
        f"tests/e2e/test_{name}.py"
        for name in (
            "cross_backend",
            "families_served",
            "places",
            "sdk_imports",
            "sdk_isolation",
            "sdk_jax",
            "tool_turns",
        )
    ),
    "tools/conformance/tests/test_conformance_jax.py",
    "tools/workbench/tests/test_compile_check.py",
)
_WITH_PEFT = tuple(
    f"tests/contract/test_{name}.py"
    for name in ("adapter_kinds", "checkpoint_command", "expert_adapters", "peft_loads_exports")
)
_OF_RANKS = ("vllm_sampler", "fsdp_backend", "megatron_backend")
_ON_POSTGRES = (
    "test_interleaving",
    "test_migrations",
    "test_postgres_serving",
    "test_postgres_store",
    "test_sql_store_contract",
    "test_stateful",
)
_OF_ONE_JAX_BACKEND = tuple(
    f"plugins/jax_backend/tests/test_{name}.py"
    for name in (
        "inflight_weights",
        "jax_compilation",
        "jax_devices",
        "jax_isolation",
        "jax_loading",
        "jax_parity",
        "jax_routing_replay",
        "jax_state",
        "native",
        "prefixes",
        "sampler",
        "sampler_faults",
        "sampler_life",
        "sampling_isolation",
        "side_by_side",
    )
)
_GROUPS = (  # one process runs all of a group: its servers, ranks and backends are made once; longest first
    ("jax", _OF_ONE_JAX_BACKEND),
    ("jax otherwise", ["plugins/jax_backend/tests"]),
    ("jax served", [*_JAX_OUTSIDE_ITS_PLUGIN, *_WITH_PEFT]),
    ("ranks", [*(f"plugins/{name}/tests" for name in _OF_RANKS), "tools/workbench/tests/test_rehearsals.py"]),
    ("crash", ["tests/crash"]),
    ("examples", ["tests/e2e/test_examples.py"]),
)


_LONG: dict[str, str | None] = {  # files, and the fixture of those of their tests that take long; None: all tests
    "plugins/fsdp_backend/tests/test_torch_tutorial.py": None,
    "tests/e2e/test_wheels.py": "dist",
}
_WITH_THE_SDK = (
    "tests/crash",
    "tests/e2e",
    "tests/features",
    "plugins/fsdp_backend/tests/test_fsdp_e2e.py",
    "plugins/megatron_backend/tests/test_megatron_e2e.py",
    "plugins/vllm_sampler/tests/test_vllm_families_sdk.py",
    "plugins/oidc_login/tests",
    "plugins/openai_endpoints/tests",
    "plugins/otel_tracing/tests",
    "plugins/vllm_sampler/tests/test_vllm_sdk.py",
    "tools/conformance/tests",
    "tools/trackers/tests",
)


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_repetitions(items)
    _mark_long(items)
    order = [name for name, _ in _GROUPS]
    items.sort(key=lambda item: order.index(name) if (name := _group(item.nodeid)) in order else len(order))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Give each group to one process.

    xdist's own loadgroup does not: 3.8 appends the group to a node id in a way that pytest 9.2 ignores, without a word.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return ByGroup(config, log)


def pytest_configure() -> None:
    gc.disable()  # until everything is imported
    if sys.version_info < (3, 12, 2):
        _parse_one_at_a_time()


def _parse_one_at_a_time() -> None:
    """Let one thread at a time make a syntax tree.

    CPython before 3.11.8 and 3.12.2 counts the depth of all trees in one place (gh-106905): two threads of a process
    that make one, such as hypothesis and a server in a test, may both end in SystemError.
    """
    parse, lock = ast.parse, threading.RLock()  # noqa: TID251 - what others call

    @wraps(parse)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return parse(*args, **kwargs)

    ast.parse = locked  # noqa: TID251


def pytest_collection_finish() -> None:
    """Exempt all that was imported from garbage collection: a collection would look at millions of objects."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Collect what the SDK left open at the end of each of its files, where the warnings about it are expected.

    This runs after the file's own fixtures are torn down.
    """
    try:
        yield
    finally:
        ends = nextitem is None or nextitem.path != item.path
        if ends and any(item.path.is_relative_to(_ROOT / place) for place in _WITH_THE_SDK):
            gc.collect()


def _group(nodeid: str) -> str:
    """Return the test's group; by default its file."""
    return _group_of_file(nodeid.partition("::")[0])


@cache
def _group_of_file(file: str) -> str:
    path = Path(file)
    for name, members in _GROUPS:
        if any(path.is_relative_to(member) for member in members):
            return name
    return "postgres" if path.stem in _ON_POSTGRES else file


def _mark_repetitions(items: Iterable[pytest.Item]) -> None:
    """Leave repetitions of the shipped suites to `make test-all` where a test takes long: with the plugins' backends.

    Of a test that is repeated with several parameters, `make test` runs the first, and the first with each loss. What
    a loss computes does not depend on which weights are trained, so of full fine-tuning it runs one loss. With the toy
    backend it runs them all.
    """
    seen = set[tuple[object, ...]]()
    for item in items:
        if not isinstance(item, pytest.Function) or not item.path.is_relative_to(_PLUGINS):
            continue
        if not item.function.__module__.startswith("tinsmith.testing.") or item.get_closest_marker("thorough"):
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        loss = None if "FullFineTuning" in item.nodeid else parameters.get("loss_fn")
        key = (item.cls, item.originalname, loss)
        if key in seen:
            item.add_marker(pytest.mark.thorough)
        seen.add(key)


def _mark_long(items: Iterable[pytest.Item]) -> None:
    """Leave to `make test-all` what holds documents and packages, and takes long, rather than what is served."""
    for item in items:
        file = str(item.path.relative_to(_ROOT)) if item.path.is_relative_to(_ROOT) else ""
        fixture = _LONG.get(file, "-")
        if fixture is None or fixture in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.thorough)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:  # Any: a Browser of tests/e2e/browser.py, which not every test can import
    from browser import running_browser

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    with running_browser(chromium, tmp_path / "profile") as browser:
        yield browser


@pytest.fixture
def take(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return what holds that nothing of a view is wider than the page, and in the long run takes its pictures."""
    pictures = Path(os.environ.get("PAGE_PICTURES", tmp_path))
    sizes = {"desktop": (1280, 800), "phone": (390, 844)}
    wanted = "PAGE_PICTURES" in os.environ or "not thorough" not in request.config.option.markexpr

    def take(view: str) -> None:
        for device, (width, height) in sizes.items():
            for dark in (False, True) if wanted else (False,):
                browser.look(width=width, height=height, dark=dark)
                assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), (view, device)
                if wanted:
                    browser.picture(pictures / f"{view}-{device}-{'dark' if dark else 'light'}.png")

    return take
