"""The program that runs the cookbook's entry points, and what it found: docs/reference/cookbook.json."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cookbook_matrix
import pytest
from cookbook import page, served
from cookbook.entries import ENTRIES, NO_SERVER, Entry, Lack

from tinsmith.testing.harness import running_server

RECORD = Path(__file__).parents[2] / "docs" / "reference" / "cookbook.json"
FOUND = json.loads(RECORD.read_text(encoding="utf-8"))
PYTHON = os.environ.get("TINSMITH_COOKBOOK_PYTHON", sys.executable)
FEW = ("recipes.sl_loop", "recipes.rl_loop", "eval.custom_evaluators")
CREATES = """
import json, os, urllib.request

def post(call, **body):
    headers = {"X-API-Key": os.environ["TINKER_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["TINKER_BASE_URL"] + "/api/v1/" + call
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

session = post("create_session", tags=[], sdk_version="0.38.0")["session_id"]
post("create_model", session_id=session, model_seq_id=0, base_model="toy", lora_config={"rank": 8})
"""
SANDBOX = Lack(what="a sandbox", shown_by="no sandbox at .*")


def test_a_row_tells_what_the_server_accepted(tmp_path: Path) -> None:
    """Not what the exit code claims; and a lack is believed only if the program's own words show it."""
    scripts = {
        "creates": CREATES,
        "silent": "print('done')",
        "lacking": "raise OSError('no sandbox at all')",
        "broken": "raise ValueError('of its own')",
        "serving": "print('up', flush=True)\nimport time\ntime.sleep(600)",
    }
    (tmp_path / "tinker_cookbook").mkdir()
    for name, text in scripts.items():
        (tmp_path / "tinker_cookbook" / f"{name}.py").write_text(text)
    with running_server(tmp_path / "data") as server:
        place = served.Place(
            url=server.url, hub_url="http://127.0.0.1:9", directory=tmp_path, python=Path(sys.executable), backend="toy"
        )
        rows = {
            name: served.run_entry(Entry(module=name, does=("create_model",), lacks=SANDBOX), place)
            for name in ("creates", "silent", "lacking", "broken")
        }
        rows["serving"] = served.run_entry(Entry(module="serving", up="^up$"), place)
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "creates": "runs",
        "silent": "fails",
        "lacking": "cannot",
        "broken": "fails",
        "serving": "runs",
    }
    assert rows["creates"]["submitted"] == {"create_model": 1}
    assert rows["silent"]["said"] == "it submitted nothing"
    assert (rows["lacking"]["lacks"], rows["lacking"]["said"]) == ("a sandbox", "OSError: no sandbox at all")
    assert rows["broken"]["said"] == "ValueError: of its own"


def test_the_page_shows_each_row() -> None:
    about = {"arguments": [], "why": "", "note": "", "stand_ins": ["maker/texts"], "submitted": {"sample": 2}}
    rows = [
        {"module": "a", "outcome": "runs", **about, "note": "slowly"},
        {"module": "b", "outcome": "runs with arguments", **about, "arguments": ["x=1"], "why": "y is not here"},
        {"module": "c", "outcome": "cannot", **about, "lacks": "a sandbox", "said": "no | sandbox"},
    ]
    text = page.render(
        {"when": "today", "versions": {"tinker-cookbook": "1.2"}, "no_server": ["d"], "not_run": ["e"], "rows": rows}
    )
    assert "5 modules of tinker-cookbook 1.2 are programs, and 3 of them were run." in text
    assert "| `a` | runs; slowly |  | maker/texts | 2 sample |" in text
    assert "| `b` | runs with arguments: y is not here | `x=1` | maker/texts | 2 sample |" in text
    assert "| `c` | a sandbox | `no \\| sandbox` |" in text


def test_the_page_is_about_the_entry_points_that_the_program_runs_and_none_fails() -> None:
    run = [row["module"] for row in FOUND["rows"]]
    assert run == [entry.module for entry in ENTRIES if entry.module not in FOUND["not_run"]]
    assert [row["module"] for row in FOUND["rows"] if row["outcome"] == "fails"] == []
    assert {*run, *FOUND["not_run"]} == {entry.module for entry in ENTRIES}
    assert FOUND["no_server"] == list(NO_SERVER)


def installed() -> bool:
    looked = subprocess.run([PYTHON, "-c", "import tinker_cookbook.rl.train"], capture_output=True, check=False)
    return looked.returncode == 0


@pytest.mark.slow
def test_every_program_of_the_cookbook_is_in_the_table() -> None:
    if not installed():
        pytest.skip(f"tinker-cookbook is not installed for {PYTHON}")
    where = subprocess.run(
        [PYTHON, "-c", "import tinker_cookbook; print(tinker_cookbook.__path__[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    root = Path(where.stdout.strip())
    programs = {
        str(file.relative_to(root).with_suffix("")).replace("/", ".")
        for file in root.rglob("*.py")
        if '\nif __name__ == "__main__":' in file.read_text(encoding="utf-8")
    }
    assert programs - {"recipes.code_rl.lcb_utils"} == {*(entry.module for entry in ENTRIES), *NO_SERVER} - MAINS


MAINS = {"recipes.chat_sl.sweep.__main__"}  # it needs no such line


@pytest.mark.slow
@pytest.mark.thorough
def test_rows_are_found_again(tmp_path: Path) -> None:
    if not installed():
        pytest.skip(f"tinker-cookbook is not installed for {PYTHON}")
    file = tmp_path / "cookbook.json"
    arguments = ["--python", PYTHON, "--json", str(file), "--work-dir", str(tmp_path / "work"), "--only", *FEW]
    assert cookbook_matrix.main(arguments) == 0
    published: dict[str, Any] = {row["module"]: row["outcome"] for row in FOUND["rows"]}
    for row in json.loads(file.read_text())["rows"]:
        assert row["outcome"] == published[row["module"]], row
