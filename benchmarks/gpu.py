"""What tinsmith does on one GPU, as shares of what the card can do. Meant to take eight minutes.

    python benchmarks/gpu.py --out gpu.json                  # the shape of Qwen3-8B in bfloat16
    python benchmarks/gpu.py --parts limits training         # some parts
    python benchmarks/gpu.py --toy                           # tiny shapes on the CPU: shows that it runs
    python benchmarks/gpu.py --publish gpu.json              # adds that run to docs/reference/gpu.json

    limits          a large product of matrices, a copy of memory: what the others are compared with
    training        the fsdp backend: 1 and 16 tenants with the same tokens, and packings that compile nothing new
    jax_training    the jax backend: what compiling costs, 1 and 8 tenants with the same tokens, and new packings
    skyrl_training  the same batches through SkyRL's JAX backend, where it is installed
    jax_sampling    the jax sampler: 64 long sequences of an adapter, prompts, the way of an adapter to its first token,
                    and how far its logprobs are from the trainer's
    experts         the megatron backend: the same on a mixture of experts, Qwen3-30B-A3B with twelve of its layers
    peft_training   the same tokens through transformers and PEFT, one adapter
    drawing         a token for each of 256 sequences, beside vLLM's own way
    sampling        the vllm sampler: 256 seeded sequences of an adapter, and the way of an adapter to its first token
    plain_vllm      the same sequences through vLLM alone
    served          an RL iteration through `tinsmith serve` and the SDK, trainer and sampler on the same card

Weights are random, and made on the device. Every part is a process of its own with a time limit, the most informative
first: what is left when all of the time is over is not measured. A part that fails, or lacks a package, is reported as
such, with the figures that it had by then, and the others run. Exits with 1 if a part failed.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpu_parts import history
from gpu_parts.common import NOTE, NotInstalledError, Options, Report

PARTS: Final[Mapping[str, float]] = {
    "limits": 20,
    "training": 130,
    "jax_sampling": 90,
    "jax_training": 100,
    "skyrl_training": 130,
    "drawing": 20,
    "experts": 90,
    "peft_training": 45,
    "sampling": 120,
    "plain_vllm": 60,
    "served": 120,
}
"""With what each may take, in seconds. `sampling` and `plain_vllm` need vLLM."""
IN_ALL_S: Final = 470


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Options.add_to(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="default: all")
    parser.add_argument("--part-timeout-s", type=float, help="of each part, instead of its own limit")
    parser.add_argument("--within-s", type=float, default=IN_ALL_S, help=f"of all parts; default {IN_ALL_S}")
    parser.add_argument("--out", type=Path, help="write the report here, too; rewritten after each part")
    parser.add_argument(
        "--publish", nargs="+", type=Path, help="measure nothing, and add these reports of a run to the documentation's"
    )
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)  # in a process of its own
    parsed = parser.parse_args()
    if parsed.publish:
        history.publish(parsed.publish)
        return 0
    if parsed.one:
        parsed.out.write_text(json.dumps(one(parsed.one, Options.of(parsed))), encoding="utf-8")
        return 0
    found: dict[str, Report] = {"run": history.this_run()}
    until = time.monotonic() + parsed.within_s
    for part in parsed.parts:
        limit = min(parsed.part_timeout_s or PARTS[part], until - time.monotonic())
        print(f"{part} ...", file=sys.stderr, flush=True)
        found[part] = apart(part, limit, sys.argv[1:]) if limit > 0 else {"not_measured": "no time was left"}
        if parsed.out:
            parsed.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))
    return 1 if any("error" in report for report in found.values()) else 0


def one(part: str, options: Options) -> Report:
    try:
        report: Report = importlib.import_module(f"gpu_parts.{part}").run(options)
    except NotInstalledError as error:
        return {"not_measured": f"{error} is not installed"}
    except Exception as error:  # noqa: BLE001  (reported; the other parts go on)
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return report


def apart(part: str, timeout_s: float, arguments: Sequence[str]) -> Report:
    """Run a part as a process. What it prints goes to the error output, and its figures count if it does not end."""
    started = time.monotonic()
    error: Report = {"error": "the process ended without a report"}
    with tempfile.TemporaryDirectory() as directory:
        out, told = Path(directory) / "report.json", Path(directory) / "told"
        command = [sys.executable, __file__, *arguments, "--one", part, "--out", str(out)]
        with told.open("w") as stdout, subprocess.Popen(command, stdout=stdout, start_new_session=True) as process:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
                error = {"error": f"took longer than {timeout_s:.0f} s"}
        lines = told.read_text(encoding="utf-8").splitlines()
        print("\n".join(lines), file=sys.stderr, flush=True)
        report: Report = json.loads(out.read_text()) if out.exists() else error
    return noted(lines) | report | {"part_took_s": round(time.monotonic() - started, 1)}


def noted(lines: Sequence[str]) -> Report:
    figures: Report = {}
    for line in lines:
        if line.startswith(NOTE):
            figures |= json.loads(line.removeprefix(NOTE))
    return figures


if __name__ == "__main__":
    sys.exit(main())
