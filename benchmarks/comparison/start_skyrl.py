"""Run the Tinker server of SkyRL with its JAX backend, in the best configuration that we know for this comparison.

    start_skyrl CHECKOUT --python PYTHON ...

PYTHON is that of an environment with what its extras `jax` and `tinker` need. The checkout is not changed. What differs
from its documented start:

- It asks `uv run` to start its engine. A script of that name runs PYTHON instead, so nothing is installed meanwhile.
- Before Python 3.12 pydantic refuses `typing.TypedDict`, so `typing_extensions` takes its place.
- As many slots for adapters as the scenarios use and two more, and no larger rank than they use: a step costs as much
  as the slots and ranks that are configured, used or not.
- It computes in float32. In bfloat16, which the model's config.json asks for, training on a CPU takes a tenth longer,
  and sampling as long. There is no setting for that, so it is given the model with another config.json.
- Compiled programs are kept between runs, as tinsmith's are.
- `--xla-flags` are for XLA. Its program for a hybrid waits for itself forever on two cores, unless it is told
  `--xla_cpu_enable_concurrency_optimized_scheduler=false`.
- The C library is told to keep memory in large pages, as tinsmith tells it in its engines.
"""

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from comparison import launch
from tinsmith.processes.engine_child import with_pages_that_stay

_UV: Final = """#!/bin/sh
while [ "$1" != "-m" ]; do shift; done
{python} "$@"
"""
_OLD_PYTHON: Final = """import sys
if sys.version_info < (3, 12):
    import typing, typing_extensions
    typing.TypedDict = typing_extensions.TypedDict
"""
_SPARE_SLOTS: Final = 2
_PACKAGES: Final = ("jax", "flax", "optax", "tinker", "transformers")


def main() -> None:
    parser = launch.parser(__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default float32")
    parser.add_argument("--xla-flags", default=os.environ.get("XLA_FLAGS", ""))
    options = parser.parse_args()
    work_dir = options.work_dir / options.dtype
    bin_dir = _write_helpers(work_dir, options.python)
    backend = {"max_lora_adapters": options.max_models + _SPARE_SLOTS, "max_lora_rank": options.rank}
    port, base_model = launch.free_port(), str(_copied(options.model.resolve(), options.dtype, work_dir))
    command = [str(bin_dir / "uv"), "run", "-m", "skyrl.tinker.api", "--base-model", base_model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--backend", "jax", "--backend-config", json.dumps(backend)]
    command += ["--database-url", f"sqlite:///{_fresh(work_dir / 'skyrl.db')}"]
    command += ["--checkpoints-base", str(work_dir / "checkpoints")]
    launch.run(
        command,
        log=work_dir / "server.log",
        environ=_environ(options.checkout, work_dir, bin_dir, options.xla_flags),
        url=lambda _: _healthy(f"http://127.0.0.1:{port}"),
        description={
            "name": "SkyRL" if options.dtype == "float32" else f"SkyRL in {options.dtype}",
            "version": _revision(options.checkout),
            "base_model": base_model,
            "configuration": {
                **backend,
                "dtype": options.dtype,
                **({"XLA_FLAGS": options.xla_flags} if options.xla_flags else {}),
                **_versions(options.python),
            },
        },
    )


def _write_helpers(work_dir: Path, python: Path) -> Path:
    """Write `uv` and the module that Python imports at its start; return the directory of both."""
    bin_dir = work_dir / "bin"
    bin_dir.mkdir(parents=True, exist_ok=True)
    (bin_dir / "sitecustomize.py").write_text(_OLD_PYTHON)
    (bin_dir / "uv").write_text(_UV.format(python=python.absolute()))
    (bin_dir / "uv").chmod(0o755)
    return bin_dir


def _copied(model: Path, dtype: str, work_dir: Path) -> Path:
    """Return a directory with a config.json that asks for `dtype`, and links to the model's other files."""
    copy = work_dir / "model"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for file in model.iterdir():
        (copy / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    (copy / "config.json").unlink()
    if "text_config" in config:  # of a model that also sees
        config["text_config"]["dtype"] = dtype
    (copy / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype, "dtype": dtype}))
    return copy.resolve()


def _environ(checkout: Path, work_dir: Path, bin_dir: Path, xla_flags: str) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{bin_dir}{os.pathsep}{checkout.absolute()}",
        "HF_HUB_OFFLINE": "1",
        "GLIBC_TUNABLES": with_pages_that_stay(""),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags,
        "JAX_COMPILATION_CACHE_DIR": str((work_dir / "cache").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _fresh(database: Path) -> Path:
    """Remove what an earlier run left: unfinished requests of it would be done first."""
    for file in database.parent.glob(f"{database.name}*"):
        file.unlink()
    return database.absolute()


def _healthy(url: str) -> str | None:
    try:
        urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).close()
    except (urllib.error.URLError, OSError):
        return None
    return url


def _revision(checkout: Path) -> str:
    """Return the commit, or the version if the checkout is an archive."""
    asked = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short=9", "HEAD"], check=False, capture_output=True, text=True
    )
    if asked.returncode == 0:
        return asked.stdout.strip()
    lines = (checkout / "skyrl" / "__init__.py").read_text().splitlines()
    return next((line.split('"')[1] for line in lines if line.startswith("__version__")), "unknown")


def _versions(python: Path) -> dict[str, str]:
    program = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {_PACKAGES}}}))"
    asked = subprocess.run([str(python), "-c", program], check=True, capture_output=True)
    found: dict[str, str] = json.loads(asked.stdout)
    return found


if __name__ == "__main__":
    main()
