"""The order of all tests: the files that take longest come first, so that no process is left alone with one of them."""

from pathlib import Path

import pytest

_ROOT = Path(__file__).parent
_FIRST = [  # on two busy cores from four minutes down to half a minute
    "tests/e2e/test_examples.py",
    "tests/e2e/test_kill_nine.py",
    "plugins/vllm_sampler/tests/test_vllm_life.py",
    "plugins/vllm_sampler/tests/test_vllm_contract.py",
    "plugins/vllm_sampler/tests/test_vllm_parity.py",
    "plugins/vllm_sampler/tests/test_vllm_sdk.py",
    "tests/e2e/test_cross_backend.py",
    "tests/crash/test_campaign.py",
    "tests/e2e/test_sdk_jax.py",
    "plugins/jax_backend/tests/test_jax_isolation.py",
    "plugins/jax_backend/tests/test_jax_compilation.py",
    "plugins/jax_backend/tests/test_sampler_life.py",
    "plugins/jax_backend/tests/test_sampler.py",
    "plugins/jax_backend/tests/test_jax_contracts.py",
    "plugins/fsdp_backend/tests/test_fsdp_e2e.py",
    "plugins/fsdp_backend/tests/test_fsdp_contracts.py",
    "plugins/fsdp_backend/tests/test_fsdp_ranks.py",
    "plugins/fsdp_backend/tests/test_fsdp_modes.py",
    "tests/crash/test_disk_faults.py",
    "tests/e2e/test_stranger.py",
    "tests/e2e/test_supervisor.py",
    "tests/stateful/test_stateful.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {_ROOT / name: number for number, name in enumerate(_FIRST)}
    if missing := [str(path) for path in place if not path.is_file()]:
        msg = f"conftest.py orders test files that are not there: {missing}"
        raise pytest.UsageError(msg)
    items.sort(key=lambda item: place.get(item.path, len(place)))  # the rest stays as it is
