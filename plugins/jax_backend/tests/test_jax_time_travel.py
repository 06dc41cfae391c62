"""`tinsmith replay` on the jax backend: another process's instance gives the same bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from few_programs import FEW_PROGRAMS

from tinsmith import operations as ops
from tinsmith.checkpoints.saved import read_checkpoint
from tinsmith.commands.replay import run_replay
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing import EngineDriver, running_server

MODEL = "s1:train:0"


def bits(root: Path, directory: str) -> dict[str, Any]:
    state = read_checkpoint(root, directory).state
    parts = {"weights": state.weights, "m": state.adam_m, "v": state.adam_v, "gradients": state.gradients}
    arrays = {f"{part} {name}": array.tobytes() for part, named in parts.items() for name, array in named.items()}
    return {**arrays, "step": state.step}


def a_pass(number: int) -> ops.ForwardBackward:
    def datum(length: int) -> ops.Datum:
        tokens = np.random.default_rng([number, length]).integers(3, 300, length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
        return ops.Datum(tokens_T=tokens[:-1].astype(np.int32), loss_inputs=inputs)

    return ops.ForwardBackward(model_id=MODEL, data=(datum(17), datum(30)))


@pytest.mark.thorough  # tests/e2e/test_time_travel.py does so with the toy backend
@pytest.mark.slow
def test_every_saved_state_is_rebuilt(tmp_path: Path, contract_model: Path) -> None:
    options = {"plugin": "jax", "warm_up": False, **FEW_PROGRAMS}
    model = ModelSettings(name="tiny", path=contract_model, backend=PluginSection.model_validate(options))
    saves = []
    with running_server(tmp_path / "data", models=[model], recovery={"point_every_operations": 5}) as server:
        client = EngineDriver(server.store, "tiny")
        server.call(client.open_session())
        server.call(client.result(server.call(client.create_model())))
        step = ops.OptimStep(model_id=MODEL, adam=ops.AdamParams(learning_rate=0.01, grad_clip_norm=0.5))
        seq_id = 0
        for number in range(4):
            for operation in (a_pass(number), step, a_pass(number + 9)):
                server.call(client.run(operation))
                seq_id += 1
            while number == 2 and not server.call(server.store.list_recovery_points(MODEL)):
                server.call(client.run(step))  # snapshots are written beside the training
                seq_id += 1
            seq_id += 1
            saves.append(seq_id)
            server.call(client.run(ops.SaveState(model_id=MODEL, path=client.path(f"at-{seq_id}"))))
        for until in (saves[0], saves[-1] - 1):
            run_replay(server.settings, Plugins.load(), run=MODEL, until=until, to=str(tmp_path / f"at-{until}"))
            number = saves[0] if until == saves[0] else saves[-1]
            saved = server.call(server.store.get_checkpoint(client.path(f"at-{number}")))
            expected = bits(server.settings.server.data_dir / "checkpoints", saved.directory)
            assert bits(tmp_path, f"at-{until}") == expected
