"""An RL iteration as a user has it: `tinsmith serve` with trainer and sampler on one card, through the SDK.

A served model is read from its files, so they are written first: of the 8B shape, with fewer layers.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from comparison.scenarios import Job, reinforce
from comparison.workbench import Workbench

from gpu_parts.common import Options, Report, needs

LAYERS = 12
PROMPTS, GROUP, NEW_TOKENS = 16, 16, 256


def run(options: Options) -> Report:
    needs("transformers", "vllm", "tinker")
    prompts, group, new_tokens = (2, 2, 8) if options.toy else (PROMPTS, GROUP, NEW_TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        vocab_size = _write(options, Path(directory) / "model")
        with _served(options, Path(directory)) as (url, base_model):
            bench = Workbench(url=url, base_model=base_model, vocab_size=vocab_size, rank=options.rank)
            iteration = reinforce(tenants=1, prompts=prompts, size=group, max_tokens=new_tokens)(bench)
            times = [_seconds(iteration) for _ in range(options.repeats + 1)]
    return {
        "sequences": prompts * group,
        "new_tokens_each": new_tokens,
        "first_iteration_s": times[0],
        "iteration_s": median(times[1:]),
    }


def _write(options: Options, directory: Path) -> int:
    """Write a model with random weights; return the size of its vocabulary."""
    shape = options.write_model(directory)
    if not options.toy:
        import transformers

        config = transformers.AutoConfig.from_pretrained(directory, num_hidden_layers=LAYERS)
        (directory / "model.safetensors").unlink()
        with options.device:
            transformers.AutoModelForCausalLM.from_config(config, dtype=options.dtype).save_pretrained(directory)  # type: ignore[no-untyped-call]
    return shape.vocab_size


@contextmanager
def _served(options: Options, directory: Path) -> Iterator[tuple[str, str]]:
    """Serve until the block ends. Give the address, and what to call the model."""
    command = [sys.executable, "-m", "comparison.start_tinsmith", "--model", str(directory / "model"), "--work-dir"]
    command += [str(directory), "--max-models", "1", "--rank", str(options.rank), "--backend", "fsdp", "--"]
    command += ["--models.0.sampler.plugin", "vllm"]
    if options.toy:
        command += ["--models.0.sampler.kv_cache_bytes", str(1 << 28), "--models.0.sampler.max_model_len", "256"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            if not line:
                msg = f"the server did not start:\n{(directory / 'server.log').read_text()[-4000:]}"
                raise RuntimeError(msg)
            told = json.loads(line)
            yield told["url"], told["base_model"]
        finally:
            server.stdin.close()


def _seconds(work: Job) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
