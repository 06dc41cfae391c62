"""What tinsmith does on one GPU, as shares of what the card can do. Meant to take ten minutes; no GPU has run it yet.

    python benchmarks/gpu.py --out gpu.json                  # the shape of Qwen3-8B in bfloat16
    python benchmarks/gpu.py --parts limits training         # some parts
    python benchmarks/gpu.py --toy                           # tiny shapes on the CPU: shows that it runs

    limits          a large product of matrices, a copy of memory: what the others are compared with
    training        the fsdp backend: 1 and 16 tenants with the same tokens, and packings that compile nothing new
    jax_training    the jax backend: what compiling costs, 1 and 8 tenants with the same tokens, and new packings
    jax_sampling    the jax sampler: 64 long sequences of an adapter, prompts, the way of an adapter to its first token,
                    and how far its logprobs are from the trainer's
    drawing         a token for each of 256 sequences, beside vLLM's own way
    experts         the megatron backend: the same on a mixture of experts, Qwen3-30B-A3B with twelve of its layers
    peft_training   the same tokens through transformers and PEFT, one adapter
    sampling        the vllm sampler: 256 seeded sequences of an adapter, and the way of an adapter to its first token
    plain_vllm      the same sequences through vLLM alone
    served          an RL iteration through `tinsmith serve` and the SDK, trainer and sampler on the same card

Weights are random, and made on the device. Every part is a process of its own with a time limit: a part that fails, or
whose packages are not installed, is reported as such, and the others run. Exits with 1 if a part failed.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from gpu_parts.common import NotInstalledError, Options, Report

PARTS = (
    "limits", "training", "jax_training", "jax_sampling", "drawing", "experts", "peft_training", "sampling",
    "plain_vllm", "served",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Options.add_to(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="default: all")
    parser.add_argument("--part-timeout-s", type=float, default=240, help="of each part")
    parser.add_argument("--out", type=Path, help="write the report here, too; rewritten after each part")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)  # in a process of its own
    parsed = parser.parse_args()
    if parsed.one:
        parsed.out.write_text(json.dumps(one(parsed.one, Options.of(parsed))), encoding="utf-8")
        return 0
    found: dict[str, Report] = {}
    for part in parsed.parts:
        print(f"{part} ...", file=sys.stderr, flush=True)
        found[part] = apart(part, parsed.part_timeout_s, sys.argv[1:])
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
    """Run a part as a process. What it prints goes to the error output."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "report.json"
        command = [sys.executable, __file__, *arguments, "--one", part, "--out", str(out)]
        try:
            subprocess.run(command, timeout=timeout_s, stdout=sys.stderr, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {timeout_s:.0f} s"}
        report: Report = (
            json.loads(out.read_text()) if out.exists() else {"error": "the process ended without a report"}
        )
    return report | {"part_took_s": round(time.monotonic() - started, 1)}


if __name__ == "__main__":
    sys.exit(main())
