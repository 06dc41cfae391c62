"""The command line, as a person types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import tinsmith
from tinsmith.commands import cli
from tinsmith.commands.cli import ELSEWHERE
from tinsmith.commands.options import base_model_name_of, settings_flags, take_model
from tinsmith.errors import ConfigError, UserError
from tinsmith.plugins.loading import Plugins
from tinsmith.settings.sources import Flag


@pytest.fixture(autouse=True)
def _no_data_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The default data directory lies in the home directory; what is there is not ours."""
    monkeypatch.setenv("HOME", str(tmp_path))


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the whole command line in this process; return exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["tinsmith", *arguments])
    with pytest.raises(SystemExit) as exited:
        cli.app()
    out, err = capsys.readouterr()
    code = exited.value.code
    return (code if isinstance(code, int) else 0), out, err


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str) -> None:
    code, out, _ = run(monkeypatch, capsys, asked)
    assert code == 0
    assert out.startswith("tinsmith 0.")


@pytest.mark.parametrize("asked", [("-h",), ("serve", "-h"), ("runs", "list", "-h")])
def test_help_has_a_short_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: tuple[str, ...]
) -> None:
    code, out, _ = run(monkeypatch, capsys, *asked)
    assert code == 0
    assert "Usage: tinsmith" in out


def test_shells_complete_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_TINSMITH_COMPLETE", "complete_bash")  # as the script of --install-completion does
    monkeypatch.setenv("COMP_WORDS", "tinsmith check-")
    monkeypatch.setenv("COMP_CWORD", "1")
    code, out, _ = run(monkeypatch, capsys)
    assert code == 0
    assert out.split() == ["check-config", "check-plugin"]


def test_a_path_that_the_locale_cannot_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "tiny-model", os.fsdecode("größe".encode("latin-1")))
    assert code == 2
    assert "set PYTHONUTF8=1" in err


def test_a_terminal_in_ascii_shows_other_characters_as_escapes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinsmith", "doctor", "--data-dir", str(tmp_path / "größe"), "toy"]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "Traceback" not in done.stderr
    assert "gr\\xf6\\xdfe" in done.stdout


def test_help_lists_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(monkeypatch, capsys, "--help")
    assert code == 0
    for command in ("serve", "engine", "plugins", "demo", "tiny-model", "check-config", "version", "replay", "runs"):
        assert command in out


def test_tiny_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ("tiny-model", str(tmp_path / "m"), "--hidden-size", "32", "--num-layers", "1", "--no-tied")
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "random parameters" in out
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["hidden_size"] == 32
    assert config["tie_word_embeddings"] is False
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "is not empty" in err
    assert run(monkeypatch, capsys, *arguments, "--force")[0] == 0


def test_plugins_shows_what_is_offered_and_what_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        @tinsmith.hookimpl
        def tinsmith_register_losses(self) -> str:
            return "not a loss"

    plugins = Plugins.load([Broken()])
    result = CliRunner().invoke(cli.build_group(plugins), ["plugins"], obj=plugins)
    assert result.exit_code == 0
    assert "store sql" in result.stdout
    assert "it must return a LossSpec" in " ".join(result.stdout.split())


def test_a_plugins_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    class Greeter:
        @tinsmith.hookimpl
        def tinsmith_register_commands(self, group: typer.Typer) -> None:
            group.command("hello")(lambda: typer.echo("hello from a plugin"))

    plugins = Plugins.load([Greeter()])
    result = CliRunner().invoke(cli.build_group(plugins), ["hello"], obj=plugins)
    assert result.stdout == "hello from a plugin\n"


@pytest.mark.parametrize(("command", "place"), ELSEWHERE.items())
def test_who_types_a_command_of_a_distribution_that_is_missing_learns_its_name(command: str, place: str) -> None:
    with pytest.raises(UserError, match=rf"`tinsmith {command}` comes with tinsmith-{Path(place).name}, which is not"):
        CliRunner().invoke(cli.build_group(Plugins()), [command, "--help"], catch_exceptions=False)


ANY_PORT = ("--server.port", "0")  # another server may have the default one


def test_check_config_prints_what_it_comes_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(
        monkeypatch,
        capsys,
        "check-config",
        *ANY_PORT,
        "--base-model",
        "any",
        "--backend",
        "toy",
        "--models.0.backend.seed=3",
    )
    assert code == 0
    [model] = json.loads(out)["models"]
    assert model["name"] == "any"
    assert model["backend"] == {"plugin": "toy", "seed": "3"}


def test_secrets_are_not_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    keys = '[{"key": "tml-hunter2", "tenant": "a"}]'
    arguments = (*ANY_PORT, "--base-model", "any", "--backend", "toy", f"--server.api_keys={keys}")
    code, out, _ = run(monkeypatch, capsys, "check-config", *arguments)
    assert code == 0
    assert "hunter2" not in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serve",), "no model to serve; give `tinsmith serve MODEL`"),
        (("serve", "--prot", "1"), "no option '--prot'; did you mean '--port'?"),
        (("serve", "--server.port"), "--server.port needs a value"),
        (("serve", "a/b", "--server.port", "1", "c/d"), "one model can be given here, and these are 2: a/b, c/d"),
        (("serve", "a/b", "--base-model", "c/d"), "one model can be given here, and these are 2: c/d, a/b"),
        (("serve", "./gone", "--backend", "jax"), "'./gone' is neither a directory nor a name that a model on the hub"),
        (("engine", "y", "here"), "unexpected argument 'here'"),
        (
            ("serve", "--base-model", "x", "--backend", "toy", "--server.prot", "1"),
            "--server.prot: server.prot: unknown",
        ),
        (("serve", "--base-model", "x", "--backend", "toyy"), "--backend: models.0.backend.plugin: no backend named"),
        (("serve", "--base-model", "x", "--backend", "toy", "--host", "0.0.0.0"), "--host: server.host: refused"),
        (("serve", "--base-model", "x", "--backend", "toy", "--host", "no.such.host"), "server.host: refused"),
        (("serve", "--config", "gone.yaml"), "cannot read the configuration file 'gone.yaml'"),
        (("engine", "y", "--base-model", "x", "--backend", "toy"), "no base model named 'y'; available: 'x'"),
        (("tiny-model", "/dev/null/x"), "'/dev/null/x' cannot be written: Not a directory; choose another directory"),
        (
            ("new-plugin", "new", "--kind", "loss", "--directory", "/dev/null/x"),
            "'/dev/null/x' cannot be written: Not a directory; choose another directory with --directory",
        ),
    ],
)
def test_mistakes_get_one_clear_message(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: tuple[str, ...],
    expected: str,
) -> None:
    monkeypatch.setenv("TINSMITH_SERVER__DATA_DIR", str(tmp_path))
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert expected in " ".join(err.split())
    assert not out


def test_a_directory_is_named_so_that_the_sdk_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    monkeypatch.chdir(tmp_path)
    assert base_model_name_of("model") == str(model)
    assert base_model_name_of("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    two_slashes = next(each for each in Path("/usr").iterdir() if each.is_dir())
    assert base_model_name_of(str(two_slashes)) == f"{two_slashes}/"


def test_base_model_flags(tmp_path: Path) -> None:
    [flag] = settings_flags(base_model="Maker/Model")
    assert json.loads(flag.text) == [{"name": "Maker/Model"}]
    [flag] = settings_flags(base_model=str(tmp_path), base_model_name="short")
    assert json.loads(flag.text) == [{"name": "short", "path": str(tmp_path)}]
    [flag] = settings_flags(base_model="Maker/Model@v1.2", base_model_name="Maker/Model")
    assert json.loads(flag.text) == [{"name": "Maker/Model", "revision": "v1.2"}]
    with pytest.raises(ConfigError, match="pass the directory that gets this name"):
        settings_flags(base_model_name="short")
    with pytest.raises(ConfigError, match="models from the hub keep their names"):
        settings_flags(base_model="Maker/Model", base_model_name="short")


def test_the_model_is_the_argument_that_belongs_to_no_option() -> None:
    assert take_model(["--server.port", "1", "a/b", "--x.y=2"], None) == ("a/b", ["--server.port", "1", "--x.y=2"])
    assert take_model(["a/b", "--server.public_url", ""], None) == ("a/b", ["--server.public_url", ""])
    assert take_model(["--server.port"], "a/b") == ("a/b", ["--server.port"])


def test_dotted_flags_win_over_short_ones() -> None:
    flags = settings_flags(short=[("--port", "server.port", 1)], rest=["--server.port", "2", "--store.url=a=b"])
    assert flags == [Flag("server.port", "1", "--port"), Flag("server.port", "2"), Flag("store.url", "a=b")]
