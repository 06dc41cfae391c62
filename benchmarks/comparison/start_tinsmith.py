"""Run this tree's tinsmith with the settings that it ships with.

Settings after `--` are passed on: `start_tinsmith ... -- --models.0.backend.decode_slots 32`.
"""

import os
import shutil
import sys
import urllib.error
import urllib.request
from importlib.metadata import version

from comparison import launch
from tinsmith.processes.data_dir_lock import read_server_url
from tinsmith.settings import DataDir
from tinsmith.settings.sources import ENV_PREFIX


def main() -> None:
    parser = launch.parser(__doc__)
    parser.add_argument("--backend", default="jax")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    data_dir = _fresh(DataDir.at(options.work_dir / "data"))

    def url(pid: int) -> str | None:
        found = read_server_url(data_dir, pid=pid)
        return found if found is not None and _is_ready(found) else None

    command = [sys.executable, "-m", "tinsmith", "serve", "--base-model", str(options.model), "--port", "0"]
    command += ["--data-dir", str(data_dir.root), "--backend", options.backend, *options.settings]
    settings = " ".join(options.settings) or "as shipped"
    launch.run(
        command,
        log=options.work_dir / "server.log",
        environ={name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)},
        url=url,
        description={
            "name": "tinsmith",
            "version": version("tinsmith"),
            "base_model": str(options.model.resolve()),
            "configuration": {"backend": options.backend, "settings": settings},
        },
    )


def _fresh(data_dir: DataDir) -> DataDir:
    """Remove what an earlier run left, but for compiled programs: models of it would be rebuilt first."""
    for path in set(data_dir.root.glob("*")) - {data_dir.root / "cache"}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return data_dir


def _is_ready(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/readyz", timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


if __name__ == "__main__":
    main()
