"""The process that compiles one program: `python -m tinsmith_jax.compile_check.child OPTIONS KIND DIRECTORY`.

It writes what it knows beforehand to facts.json, and compiles. libtpu writes what it makes of the program into the same
directory; an error goes to error.txt. A process of its own, because libtpu reads its settings once, prints what only
its authors understand, and ends the process where it did not expect something.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinsmith import TinsmithError
from tinsmith_jax.compile_check.options import Options


def main(arguments: Sequence[str]) -> int:
    text, kind, directory = arguments
    options, place = Options.model_validate_json(text), Path(directory)
    import jax

    from tinsmith_jax.compile_check.case import KINDS, make_case
    from tinsmith_jax.compile_check.model_shapes import read_model

    try:
        case = make_case(options, read_model(options.model), _devices(options.topology))
        (place / "facts.json").write_text(json.dumps(_facts(case, kind)), encoding="utf-8")
        KINDS[kind].make(case).compile()
    except (TinsmithError, jax.errors.JaxRuntimeError) as error:
        (place / "error.txt").write_text(str(error), encoding="utf-8")
        return 1
    return 0


def _devices(topology: str) -> Sequence[Any]:  # Any: jax devices
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def _facts(case: Any, kind: str) -> dict[str, Any]:  # Any: JSON; a Case, whose module imports jax
    plan = case.plan(kind)
    return {
        "base_bytes": case.base_bytes(),
        "tenant_bytes": case.tenant_bytes(),
        "zeros_bytes": case.zeros_bytes(),
        "state_bytes": case.state_bytes(kind),
        "streams": case.layout.axes.num_streams,
        "adapters": case.bucket.num_adapters,
        "formula": {} if plan is None else plan.flops(),
        "model_flops": 0 if plan is None else plan.model_flops(),
        "attention_steps": 1 if plan is None else plan.attention_steps,
        "attention_is_hidden": plan is not None and plan.attention_is_hidden,
        "planned": [] if plan is None else [[*key, count] for key, count in plan.collectives().items()],
    }


if __name__ == "__main__":
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    sys.exit(main(sys.argv[1:]))
