"""systemd is told when the server answers and when it stops, where it asks to be."""

import os
import socket
from pathlib import Path

import pytest

from tinsmith.hook_values import ServerStarted, ServerStopping
from tinsmith.plugins.loading import Plugins

STARTED = ServerStarted(url="http://127.0.0.1:8000", base_models=("toy", "big"))


def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = Plugins.load()
    abstract = f"@tinsmith-test-{os.getpid()}"
    for name, address in ((str(tmp_path / "notify"), str(tmp_path / "notify")), (abstract, "\0" + abstract[1:])):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
            heard.bind(address)
            heard.settimeout(300)
            monkeypatch.setenv("NOTIFY_SOCKET", name)
            plugins.server_started(STARTED)
            plugins.server_stopping(ServerStopping(url=STARTED.url))
            assert heard.recv(4096) == b"READY=1\nSTATUS=answering on http://127.0.0.1:8000: toy, big"
            assert heard.recv(4096).startswith(b"STOPPING=1\n")


def test_a_server_without_systemd_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    Plugins.load().server_started(STARTED)
    assert not [
        record for record in caplog.records if record.name.startswith("tinsmith")
    ]  # SDKs of other tests may log
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    Plugins.load().server_started(STARTED)
    assert "failed in tinsmith_server_started" in caplog.text
