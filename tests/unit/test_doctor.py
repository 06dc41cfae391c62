"""`tinsmith doctor` as a process: a healthy set-up, and broken ones, each with its remedy."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import run
from processes import Launcher
from stand_in_hub import StandInHub

from tinsmith.backend import Device
from tinsmith.commands.doctor import machine, models
from tinsmith.commands.doctor.machine import check_data_directory
from tinsmith.commands.doctor.probe import Answer
from tinsmith.placement.machine import Machine
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import DataDir, ModelSettings, PluginSection
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

TOY = ("toy", "--backend", "toy")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    ours = ("TINSMITH_", "HF_", "TRANSFORMERS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "TINSMITH_SERVER__DATA_DIR": str(tmp_path / "data"), "HF_HOME": str(tmp_path / "home")}


def doctor(
    launcher: Launcher, environment: dict[str, str], *arguments: str, port: int = 0
) -> tuple[int, list[dict[str, str]]]:
    """Return the exit code and what was found."""
    done = run(launcher, "doctor", *arguments, "--port", str(port), "--json", environ=environment)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["healthy"] is (done.returncode == 0)
    return done.returncode, report["findings"]


def only_problem(launcher: Launcher, environment: dict[str, str], *arguments: str, port: int = 0) -> dict[str, str]:
    code, findings = doctor(launcher, environment, *arguments, port=port)
    assert code == 1
    [problem] = [finding for finding in findings if finding["status"] == "problem"]
    return problem


def distribution(directory: Path, name: str, version: str, entry_points: str = "") -> None:
    """Install a package that is metadata alone."""
    metadata = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(entry_points)


def write_model(directory: Path) -> Path:
    write_tiny_model(directory, TinyShape(num_layers=1, hidden_size=32, intermediate_size=64))
    return directory


def test_a_healthy_set_up(launcher: Launcher, environment: dict[str, str], tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    arguments = (str(model), "--backend", "jax", "--data-dir", str(tmp_path))
    code, findings = doctor(launcher, {**environment, "JAX_PLATFORMS": "cpu"}, *arguments)
    assert code == 0
    found = {finding["subject"]: finding["found"] for finding in reversed(findings)}
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "requirements are met" in found["package tinsmith"]
    assert "requirements are met" in found["package tinsmith-jax"]
    assert found["configuration"] == "valid, models: 1"
    assert found["port 0"] == "a free one is picked"
    assert found[f"data directory {tmp_path}"] == "writable; keeps locks, fsync and renames"
    of_model = [finding["found"] for finding in findings if finding["subject"] == f"model {model}"]
    assert of_model[0] == f"0.0 GB of weights in {model}"
    assert of_model[1].startswith("supported by jax, on cpu (no accelerator), ")
    assert of_model[2].startswith("its weights take 0.0 GB of ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]  # it leaves nothing


def test_people_get_a_table(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tinsmith", "doctor", *TOY, "--port", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0
    assert done.stdout.endswith("\nhealthy\n")
    assert "model toy" in done.stdout
    assert "the backend toy brings it" in done.stdout


def test_a_broken_plugin(launcher: Launcher, environment: dict[str, str], tmp_path: Path) -> None:
    distribution(tmp_path / "site", "tinsmith-bad", "1.0", "[tinsmith]\nbad = tinsmith_bad\n")
    (tmp_path / "site" / "tinsmith_bad.py").write_text("import no_such_framework\n")
    problem = only_problem(launcher, {**environment, "PYTHONPATH": str(tmp_path / "site")}, *TOY)
    assert problem["subject"] == "plugin bad"
    assert "No module named 'no_such_framework'" in problem["found"]
    assert "install what provides 'no_such_framework'" in problem["found"]


def test_an_unsupported_version_of_a_package(launcher: Launcher, environment: dict[str, str], tmp_path: Path) -> None:
    distribution(tmp_path / "site", "fastapi", "0.1.0")
    problem = only_problem(launcher, {**environment, "PYTHONPATH": str(tmp_path / "site")}, *TOY)
    assert problem["subject"] == "package fastapi"
    assert problem["found"].startswith("0.1.0; tinsmith needs ")
    assert problem["remedy"].startswith("pip install 'fastapi")
    assert ">=0." in problem["found"]
    assert ">=0." in problem["remedy"]


def test_a_port_that_is_taken(launcher: Launcher, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problem = only_problem(launcher, environment, *TOY, port=port)
    assert problem["subject"] == f"port {port}"
    assert f"{port} is in use on 127.0.0.1; choose another with --port" in problem["found"]
    assert f"it is held by process {os.getpid()}" in problem["remedy"]


def test_a_data_directory_that_cannot_be_written(
    launcher: Launcher, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    problem = only_problem(launcher, environment, *TOY, "--data-dir", str(tmp_path / "file" / "data"))
    assert problem["subject"] == "data directory"
    assert f"cannot write to {str(tmp_path / 'file')!r}: Not a directory; choose another" in problem["found"]


def test_a_damaged_model(launcher: Launcher, environment: dict[str, str], tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with (model / "model.safetensors").open("r+b") as weights:
        weights.truncate(10_000)
    problem = only_problem(launcher, environment, str(model), "--backend", "jax")
    assert problem["subject"] == f"model {model}"
    assert "model.safetensors" in problem["found"]
    assert "cut short" in problem["found"]
    assert "copy it again" in problem["remedy"]
    (model / "model.safetensors").unlink()
    assert (
        "it has neither model.safetensors nor"
        in only_problem(launcher, environment, str(model), "--backend", "jax")["found"]
    )


def test_a_model_without_a_tokenizer(launcher: Launcher, environment: dict[str, str], tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    code, findings = doctor(launcher, environment, str(model), "--backend", "toy")
    assert code == 0
    [note] = [each for each in findings if "tokenizer.json" in each["found"]]
    assert note["status"] == "note"
    assert "chats, completions and stop strings are refused" in note["found"]


def test_a_model_that_the_backend_does_not_support(
    launcher: Launcher, environment: dict[str, str], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    problem = only_problem(launcher, environment, str(model), "--backend", "jax")
    assert "architecture 'MambaForCausalLM' is not supported" in problem["found"]


def test_fields_that_nothing_reads_and_a_tokenizer_that_draws(
    launcher: Launcher, environment: dict[str, str], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    for name, value in (("config", {"vendor_scale": 3}), ("generation_config", {"newest": 1})):
        file = model / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **value}))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["dropout"] = 0.1
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, findings = doctor(launcher, {**environment, "JAX_PLATFORMS": "cpu"}, str(model), "--backend", "jax")
    assert code == 1
    [problem] = [each for each in findings if each["status"] == "problem"]
    assert "tokenizer.json': dropout is 0.1: " in problem["found"]
    notes = [each["found"] for each in findings if each["status"] == "note" and each["subject"] == f"model {model}"]
    assert [note.partition("reads: ")[2].partition(";")[0] for note in notes] == ["newest", "vendor_scale"]


def test_a_gpu_that_a_framework_cannot_use(launcher: Launcher, environment: dict[str, str], tmp_path: Path) -> None:
    """It said "healthy", with the model on the CPU."""
    model, driver = write_model(tmp_path / "model"), tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\necho 81559\n")
    driver.chmod(0o755)
    given = {**environment, "CUDA_VISIBLE_DEVICES": "0", "PATH": f"{driver.parent}:{environment['PATH']}"}
    given.pop("JAX_PLATFORMS", None)
    code, findings = doctor(launcher, given, str(model), "--backend", "jax")
    assert code == 1
    assert [each["found"] for each in findings if each["subject"] == "GPUs"] == ["1 of 85.5 GB, by nvidia-smi"]
    [problem] = [each for each in findings if each["status"] == "problem"]
    assert "(Unknown backend cuda. Available backends are ['cpu']), and CUDA_VISIBLE_DEVICES is '0'" in problem["found"]
    assert "tinsmith-jax[cuda13]" in problem["found"]


@pytest.mark.parametrize(
    ("told", "seen", "status"),
    [(None, 2, "ok"), (None, 1, "problem"), (None, 0, "problem"), ("cpu", 0, "ok")],
)
def test_gpus_that_the_machine_has_and_a_framework_does_not_see(
    told: str | None, seen: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [Device(name="H100", memory_bytes=80 << 30)] * seen or [Device(name="cpu")]
    monkeypatch.setattr(models, "probe", lambda *_: Answer(devices, []))
    section = {"plugin": "fsdp", **({} if told is None else {"device": told})}
    asked = ModelSettings(name="m", backend=PluginSection.model_validate(section))
    machine = Machine(devices=("0", "1"), device_bytes=80 << 30)
    found = next(models.check_model(asked, Plugins.load(), machine))
    assert (found.subject, found.status) == ("backend fsdp", status)
    assert status == "ok" or f"fsdp sees {seen} of this machine's 2 GPUs" in found.found


def test_what_the_driver_says_of_gpus() -> None:
    machines = (Machine(devices=("0", "1"), device_bytes=80 << 30), Machine(devices=("0",)), Machine())
    told = [models.check_gpus(machine).found for machine in machines]
    assert told[:2] == ["2 of 85.9 GB, by nvidia-smi", "1, of unknown memory: nvidia-smi does not tell"]
    assert told[2].startswith("none")


def test_an_invalid_configuration(launcher: Launcher, environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "tinsmith.yaml"
    file.write_text("server:\n  prot: 1\n")
    problem = only_problem(launcher, environment, "--config", str(file))
    assert problem["subject"] == "configuration"
    assert f"{file}:2: server.prot: unknown key" in problem["found"]


def test_models_of_the_hub(launcher: Launcher, environment: dict[str, str], tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with StandInHub.running() as hub:
        hub.add("maker/tiny", model)
        code, findings = doctor(launcher, {**environment, "HF_ENDPOINT": hub.url}, "maker/tiny", "--backend", "jax")
        assert code == 0
        assert findings[-1]["found"] == f"0.0 GB will be downloaded from {hub.url}"
        problem = only_problem(launcher, {**environment, "HF_ENDPOINT": hub.url}, "maker/gone", "--backend", "jax")
    assert "'maker/gone' is neither a local directory nor a model visible on" in problem["found"]
    assert hub.sent == []
    problem = only_problem(launcher, {**environment, "HF_HUB_OFFLINE": "1"}, "maker/tiny", "--backend", "jax")
    assert "HF_HUB_OFFLINE forbids downloading it" in problem["found"]


def about_data(directory: Path, *, with_database: bool = True) -> list[tuple[str, str]]:
    """Return the status and the words of each finding."""
    found = check_data_directory(DataDir.at(directory), with_database=with_database)
    return [(finding.status, finding.found) for finding in found]


def test_a_full_disk_and_file_systems_with_cautions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "file_system_of", lambda _: "ext4")
    for free, status in ((20e9, "ok"), (5e9, "note"), (1e8, "problem")):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=int(free)))
        [_, (space, _)] = about_data(tmp_path)
        assert space == status
    monkeypatch.setattr(machine, "file_system_of", lambda _: "nfs4")
    for with_database, status in ((False, "note"), (True, "problem")):
        [_, _, (caution, words)] = about_data(tmp_path, with_database=with_database)
        assert caution == status
        assert words.startswith("on nfs4")


def test_locks_that_hold_nobody_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert about_data(tmp_path)[0] == ("ok", "writable; keeps locks, fsync and renames")
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    assert about_data(tmp_path)[0] == ("problem", "its file system grants one lock twice")


@pytest.mark.parametrize(("share", "status"), [(0.01, "ok"), (0.8, "note"), (1.01, "problem")])
def test_weights_against_memory(share: float, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of all devices together."""
    size = sum(file.stat().st_size for file in write_model(tmp_path).glob("*.safetensors"))
    device = Device(name="H100", memory_bytes=int(size / share / 2))
    monkeypatch.setattr(models, "probe", lambda *_: Answer([device, device], []))
    asked = ModelSettings(name="m", path=tmp_path, backend=PluginSection(plugin="jax"))
    *_, memory = models.check_model(asked, Plugins.load(), Machine())
    assert memory.found.startswith("its weights take")
    assert memory.status == status
