"""The process that compiles one program: `python -m tinsmith_workbench.compile_check.child OPTIONS KIND DIRECTORY`.

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
from tinsmith_workbench.compile_check.chips import Slice, read_slice
from tinsmith_workbench.compile_check.collectives import first_groups
from tinsmith_workbench.compile_check.options import Options


def main(arguments: Sequence[str]) -> int:
    text, kind, directory = arguments
    options, place = Options.model_validate_json(text), Path(directory)
    import jax

    from tinsmith_workbench.compile_check.case import make_case
    from tinsmith_workbench.compile_check.model_shapes import read_model

    try:
        case = make_case(options, read_model(options.model), _devices(options.topology))
        (place / "facts.json").write_text(json.dumps(_facts(case, kind, options.topology)), encoding="utf-8")
        case.program(kind).compile()
    except (TinsmithError, jax.errors.JaxRuntimeError) as error:
        (place / "error.txt").write_text(str(error), encoding="utf-8")
        return 1
    return 0


def _devices(topology: str) -> Sequence[Any]:
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def _facts(case: Any, kind: str, topology: str) -> dict[str, Any]:
    cost = case.cost(kind)
    return {
        "base_bytes": case.base_bytes(),
        "tenant_bytes": case.tenant_bytes(),
        "zeros_bytes": case.zeros_bytes(),
        "sampling_bytes": case.sampling_bytes(),
        "state_bytes": case.held_arguments(kind),
        "streams": case.layout.axes.num_streams,
        "adapters": case.bucket.num_adapters,
        "tokens": cost.tokens,
        "formula": cost.flops(),
        "counted_hbm_bytes": cost.hbm_bytes(),
        "model_flops": cost.model_flops(),
        "trips": dict(cost.trips()),
        "gathers_once": case.shape.gathers_once,
        "links": _links(case.layout.devices.devices, read_slice(topology)),
        "attention_is_hidden": cost.attention_is_hidden,
        "planned": [[*key, count] for key, count in cost.collectives().items()],
    }


def _links(devices: Any, slice_: Slice) -> dict[str, float]:
    groups = first_groups(devices).items()
    return {name: slice_.links([device.coords for device in group.ravel()]) for name, group in groups if group.size > 1}


if __name__ == "__main__":
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    sys.exit(main(sys.argv[1:]))
