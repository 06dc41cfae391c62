"""The SDK leaves HTTP connections open until they are collected; that is its own business."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))  # old calls, which scripts still use


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Collect what the SDK left here, where the warning is expected, and not in the next file's tests.

    After the fixtures have been torn down, the clients of a whole file among them.
    """
    try:
        yield
    finally:
        gc.collect()
