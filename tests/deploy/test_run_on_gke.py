"""The manifests for GKE are executed: their containers are processes of this machine, and train a tiny model.

local_cluster.py says what stands for what. The client is the tutorial's script, through the official SDK.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from local_cluster import LocalCluster, Substitutes
from manifests import HOST, SECRET, SLICE, read
from small_scale import API_KEYS, ENVIRONMENT, LINES, STEPS, on_cpu, saved, tutorial, write_model

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(3600)]

SECRETS = {SECRET: {"api-keys": API_KEYS, "worker-key": "a secret of the test, long enough"}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_model(directory)
    return directory


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> Iterator[LocalCluster]:
    """What the manifest that is the parameter describes."""
    substitutes = Substitutes(
        model_files=tiny,
        model=lambda model: on_cpu(model, name=str(tiny)),
        chips=lambda number: {"TINSMITH_JAX_SIMULATED_DEVICES": str(number)},
        environment=ENVIRONMENT,
    )
    cluster = LocalCluster(read(request.param), SECRETS, tmp_path, substitutes)
    with cluster.running():
        cluster.wait_until_ready("tinsmith-0")
        yield cluster


@pytest.mark.parametrize("cluster", [SLICE], indirect=True, ids=["v6e-4x4"])
def test_the_tutorial_loses_a_pod_of_the_slice_and_then_the_server(cluster: LocalCluster, tiny: Path) -> None:
    """The script sees delays. It ends with the same losses, bits and samples as one that nobody has disturbed."""
    [workers], server = cluster.jobsets, cluster.pods["tinsmith-0"]
    url = f"http://{server.address}:8000"  # what `kubectl port-forward` would forward
    undisturbed = list(tutorial(url, str(tiny), "undisturbed"))
    with closing(tutorial(url, str(tiny), "disturbed")) as disturbed:
        lines = [next(disturbed), next(disturbed)]
        cluster.kill("tinsmith-workers-slice-0-2")
        lines += [next(disturbed), next(disturbed)]
        assert [pod.starts for pod in workers.pods] == [2, 2, 2, 2], "all pods of the slice are new"
        assert server.starts == 1
        cluster.kill("tinsmith-0")
        lines += list(disturbed)
    assert server.starts == 2
    assert workers.restarts == 1, "the workers have joined the new engine"
    assert len(undisturbed) == LINES
    assert lines[:STEPS] == undisturbed[:STEPS]
    assert lines[-1] == undisturbed[-1], "what is sampled"
    data_dir = server.claims["data"] / "tinsmith"
    assert saved(data_dir, "disturbed") == saved(data_dir, "undisturbed")


@pytest.mark.parametrize("cluster", [HOST], indirect=True, ids=["v6e-one-host"])
def test_the_tutorial_loses_the_only_pod(cluster: LocalCluster, tiny: Path) -> None:
    server = cluster.pods["tinsmith-0"]
    with closing(tutorial(f"http://{server.address}:8000", str(tiny), "trained")) as lines:
        first = [next(lines), next(lines)]
        cluster.kill("tinsmith-0")
        assert len([*first, *lines]) == LINES
    assert server.starts == 2
