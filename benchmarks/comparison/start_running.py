"""Do not start anything: measure a server that runs already.

    start_running --url URL --base-model NAME [--pid PID] [--name NAME]

With the process id of a server of this machine, its CPU seconds and memory are measured, too.
"""

import json
import sys

from comparison import launch


def main() -> None:
    parser = launch.parser(__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--pid", type=int)
    parser.add_argument("--name", default="server")
    options = parser.parse_args()
    described = {"version": "unknown", "configuration": {"started": "by hand"}}
    where = {"url": options.url, "pid": options.pid, "base_model": options.base_model}
    print(json.dumps({"name": options.name, **where, **described}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
