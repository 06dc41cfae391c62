"""Runs examples/tutorial_pig_latin.py as it is, through the official SDK, and then saves what it has trained.

Only the seed is fixed, which the server draws otherwise, so that two runs can be compared: it is set in the SDK.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import tinker

SCRIPT = Path(__file__).parents[2] / "examples" / "tutorial_pig_latin.py"


def main(checkpoint: str, *arguments: str) -> None:
    made: list[tinker.TrainingClient] = []
    create = tinker.ServiceClient.create_lora_training_client

    def create_with_seed(service: tinker.ServiceClient, **options: Any) -> Any:
        return _Remembering(create(service, **options, seed=7), made)

    tinker.ServiceClient.create_lora_training_client = create_with_seed  # type: ignore[method-assign]
    sys.argv = [str(SCRIPT), *arguments]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    print(made[0].save_state(name=checkpoint).result().path, flush=True)


class _Remembering:
    """A future that keeps its result."""

    def __init__(self, future: Any, results: list[Any]) -> None:
        self._future = future
        self._results = results

    def result(self) -> Any:
        self._results.append(self._future.result())
        return self._results[-1]


if __name__ == "__main__":
    main(*sys.argv[1:])
