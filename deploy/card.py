"""Run the tests and the benchmark of GPUs, also on a machine that has a GPU, but no network and no `make setup`.

    python deploy/card.py pack          # here: puts what is missing there into .card/, about 25 MiB
    python deploy/card.py test          # there: the tests of tests/gpu, in at most four minutes
    python deploy/card.py bench         # there: benchmarks/gpu.py, in at most eight; writes gpu.json
    python deploy/card.py test bench    # both; one that fails does not keep the other from running

That machine has this directory with .card/ in it, and Python 3.12 with torch, jax, transformers, pytest, pytest-timeout
and pytest-xdist. The wheels of .card/ are installed into a directory of their own. Where there is no .card/, the
environment of this Python has everything.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKED: Final = ROOT / ".card"
SOURCES: Final = (
    ROOT / "core",
    *sorted(ROOT.glob("libraries/*")),
    *sorted(ROOT.glob("plugins/*")),
    ROOT / "tools/workbench",
)
DISTRIBUTIONS: Final = (ROOT, *SOURCES[1:])
REQUIREMENTS: Final = Path(__file__).with_name("card-requirements.txt")
PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
TARGET: Final = "--python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none"
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_BYTES: Final = 64 << 20
TESTS_S: Final = 240
BENCH_S: Final = 480
FILES_AT_ONCE: Final = 7
SLOWNESS_OF_A_DRY_RUN: Final = 10
_TIMED_OUT: Final = 124


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("pack", "test", "bench"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="for gpu.json; default $OUT")
    options = parser.parse_args()
    runs: dict[str, Callable[[], int]] = {"pack": pack, "test": test, "bench": lambda: bench(options.out)}
    codes = {what: runs[what]() for what in options.what}
    for what, code in codes.items():
        print(f"{what}: {'ok' if code == 0 else f'failed with {code}'}", flush=True)
    return max(codes.values())


def pack() -> int:
    """Put wheels of tinsmith, and of what it needs, into .card/."""
    shutil.rmtree(PACKED, ignore_errors=True)
    own = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(PACKED)]
    subprocess.run([*own, *map(str, DISTRIBUTIONS)], check=True)
    others = [*PIP, "download", "--no-deps", "--only-binary", ":all:", *TARGET.split(), "--dest", str(PACKED)]
    others += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*others, "--requirement", str(REQUIREMENTS)], check=True)
    size = sum(wheel.stat().st_size for wheel in PACKED.iterdir())
    print(f"{len(list(PACKED.iterdir()))} wheels of {size / 2**20:.1f} MiB in {PACKED}")
    return 0 if size <= MOST_BYTES else 1


def test() -> int:
    on_cpu = os.environ.get("TINSMITH_GPU_TESTS") == "cpu"
    processes = max(1, min(FILES_AT_ONCE, os.cpu_count() or 1))
    tests = ROOT / "tests" / "gpu"
    command = ["-m", "pytest", "-c", str(tests / "pytest.ini"), str(tests), "-n", str(processes), "--dist", "loadfile"]
    limit = TESTS_S * (SLOWNESS_OF_A_DRY_RUN if on_cpu else 1)
    command += ["--durations=10", *(["--timeout", str(limit)] if on_cpu else [])]
    return limited(command, limit)


def bench(out: Path) -> int:
    return limited([str(ROOT / "benchmarks" / "gpu.py"), "--out", str(out / "gpu.json")], BENCH_S)


def limited(arguments: Sequence[str], limit_s: float) -> int:
    """Run Python in a process group of its own, and end all of that if it takes too long."""
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            print(f"took longer than {limit_s:g} s", flush=True)
            os.killpg(process.pid, signal.SIGKILL)
            return _TIMED_OUT


def environment() -> Mapping[str, str]:
    """Return what processes need to find tinsmith: the sources that lie here, and wheels for all else."""
    cores = os.cpu_count() or 1
    changed = {
        "OMP_NUM_THREADS": str(max(1, cores // FILES_AT_ONCE)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if PACKED.is_dir():
        site = installed()
        places = [*map(str, SOURCES), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        changed |= {
            "PYTHONPATH": os.pathsep.join(places),
            "PATH": os.pathsep.join([str(site / "bin"), os.environ["PATH"]]),
        }
    return {**os.environ, **changed}


def installed() -> Path:
    """Install the wheels, unless they are, and return where."""
    wheels = sorted(str(wheel) for wheel in PACKED.glob("*.whl"))
    site = Path(tempfile.gettempdir()) / f"tinsmith-card-{os.getuid()}"
    done = site / "installed.txt"
    if not done.is_file() or done.read_text() != "\n".join(wheels):
        shutil.rmtree(site, ignore_errors=True)
        install = ["install", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)]
        subprocess.run([*PIP, *install, *wheels], check=True)
        done.write_text("\n".join(wheels))
    return site


if __name__ == "__main__":
    sys.exit(main())
