"""An honest client that may not poll for all of its results at once waits, and gets all of them."""

import time
from contextlib import ExitStack
from pathlib import Path

import tinker
from tinker import types

from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import make_store
from tinsmith.testing.engine_thread import engine_thread
from tinsmith.testing.harness import TOY, RunningServer, running_server
from tinsmith.testing.sdk_data import TOKENS

WAIT_S = 300


def refusals(server: RunningServer) -> int:
    counted = {"route": "/api/v1/retrieve_future", "status": "429"}
    registry = server.app.state.context.metrics.registry
    return int(registry.get_sample_value("tinsmith_http_requests_total", counted) or 0)


def test_the_sdk_waits_for_its_turn_to_poll(tmp_path: Path) -> None:
    options = {"poll_samples_together": "never", "long_poll_s": 0.3}
    with ExitStack() as stack:
        server = stack.enter_context(running_server(tmp_path, engines=False, server=options, quotas={"long_polls": 1}))
        service = stack.enter_context(tinker.ServiceClient(base_url=server.url, api_key="tml-ann"))
        sampler = service.create_sampling_client(base_model="toy").result(timeout=WAIT_S)
        prompt, params = types.ModelInput.from_ints(TOKENS), types.SamplingParams(max_tokens=3)
        samples = [sampler.sample(prompt, 1, params) for _ in range(3)]
        deadline = time.monotonic() + WAIT_S
        while refusals(server) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert refusals(server) >= 2
        plugins = Plugins.load()
        stack.enter_context(engine_thread(server.settings, TOY, plugins, make_store(server.settings, plugins)))
        for sample in samples:
            assert len(sample.result(timeout=WAIT_S).sequences) == 1
