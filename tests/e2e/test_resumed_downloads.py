"""A download of a checkpoint that broke off goes on where it ended, by curl as by any client of HTTP."""

import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import tinker

from tinsmith.testing.harness import running_server


def test_curl_goes_on_with_an_archive(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    with running_server(tmp_path / "data") as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-ann")
        training = client.create_lora_training_client("toy", rank=4).result()
        path = training.save_state("first").result().path
        run, _, name = path.removeprefix("tinker://").partition("/")
        with httpx.Client(base_url=server.url, timeout=300, headers={"x-api-key": "tml-ann"}) as http:
            route = f"/api/v1/training_runs/{run}/checkpoints/{name}/archive"
            whole = http.get(http.get(route).json()["url"])
            again = http.get(http.get(route).json()["url"])  # by another link
            assert (again.content, again.headers["etag"]) == (whole.content, whole.headers["etag"])
            assert whole.headers["accept-ranges"] == "bytes"
            url, half = http.get(route).json()["url"], len(whole.content) // 2
            file = tmp_path / "archive.tar"
            file.write_bytes(whole.content[:half])
            subprocess.run(["curl", "-sS", "--fail", "-C", "-", "-o", str(file), url], check=True, timeout=300)
            assert file.read_bytes() == whole.content
            rest = {"Range": f"bytes={half}-"}
            part = http.get(url, headers={**rest, "If-Range": whole.headers["etag"]})
            assert (part.status_code, part.content) == (206, whole.content[half:])
            assert part.headers["content-range"] == f"bytes {half}-{len(whole.content) - 1}/{len(whole.content)}"
            training.save_state("first", overwrite=True).result()
            newer = http.get(route).json()["url"]
            other = http.get(newer, headers={**rest, "If-Range": whole.headers["etag"]})
            assert (other.status_code, len(other.content)) == (200, len(whole.content))
            behind = http.get(newer, headers={"Range": f"bytes={len(whole.content)}-"})
            assert behind.status_code == 416
            assert behind.headers["content-range"] == f"bytes */{len(whole.content)}"
        client.close("success").result(timeout=300)
