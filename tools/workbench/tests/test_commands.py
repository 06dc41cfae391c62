"""The workbench's commands, found like those of any plugin."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner
from workbench_harness import typed

from tinsmith import ConfigError
from tinsmith.commands.cli import WORKBENCH, build_group
from tinsmith.plugins.loading import Plugins
from tinsmith_workbench import plugin


def test_the_core_knows_which_commands_it_sends_people_here_for() -> None:
    assert tuple(plugin.COMMANDS) == WORKBENCH


def test_they_are_found_where_the_workbench_is_installed() -> None:
    plugins = Plugins.load()
    assert {row.name: row.offers for row in plugins.report()}["workbench"] == ("register_commands",)
    for command in WORKBENCH:
        done = CliRunner().invoke(build_group(plugins), [command, "--help"], obj=plugins, catch_exceptions=False)
        assert f"{command} [OPTIONS]" in done.output


def test_without_a_backend_its_commands_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda _: None)
    for command, (_, backend) in plugin.COMMANDS.items():
        if backend is not None:
            told = rf"`tinsmith {command}` computes .* install ./libraries/workers ./plugins/{backend}_backend in"
            with pytest.raises(ConfigError, match=told):
                typed(command, "--model", "Qwen3-8B", "--help")


@pytest.mark.parametrize("command", [("compile-table",), ("rehearsal-table", "--model", "Qwen3-8B")], ids=" ".join)
def test_a_file_that_is_not_there_is_an_error_of_the_user(command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(build_group(Plugins.load()), [*command, "absent"], catch_exceptions=False)
    assert done.exit_code == 2
    assert "'absent' does not exist" in done.output


def test_no_daily_test_imports_what_compiles_or_simulates() -> None:
    root = Path(__file__).parents[3]
    files = [*root.glob("tests/**/*.py"), *root.glob("*/*/tests/*.py"), *root.glob("core/tinsmith/testing/*.py")]
    texts = {each.relative_to(root): each.read_text() for each in files}
    imports = re.compile(r"^from tinsmith_workbench\.(compile_check|simulation)", re.M)
    using = {name for name, text in texts.items() if imports.search(text) and name.name.startswith("test_")}
    assert len(using) >= 3
    assert [name for name in using if "pytestmark = pytest.mark.thorough" not in texts[name]] == []
