"""The documentation says what the code does."""

import ast
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import syntax_trees
import yaml
from tutorial_pages import files_of, written

import tinsmith
from tinsmith import hookspecs
from tinsmith.authoring.new_plugin import PluginKind, write_plugin
from tinsmith.commands.load_settings import load_settings
from tinsmith.plugins.discovery import HOOK_NAMES
from tinsmith.plugins.loading import Plugins
from tinsmith.settings.sources import Flag
from tinsmith.testing import LossContract

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOOKS_PAGE = (DOCS / "reference" / "hooks.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("[a-z]*/*/README.md")])


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def section(hook: str) -> str:
    found = re.search(rf"^### `{hook}`\n(.*?)(?=^##|\Z)", HOOKS_PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, f"docs/reference/hooks.md has no section {hook!r}"
    return found.group(1)


@pytest.mark.parametrize("hook", HOOK_NAMES)
def test_every_hook_is_documented_with_its_exact_signature(hook: str) -> None:
    [function] = syntax_trees.parse(inspect.getsource(getattr(hookspecs, hook))).body
    assert isinstance(function, ast.FunctionDef)
    assert function.returns is not None
    signature = f"def {hook}({ast.unparse(function.args)}) -> {ast.unparse(function.returns)}"
    assert blocks(section(hook), "python")[0].strip() == signature


@pytest.mark.parametrize("hook", HOOK_NAMES)
def test_every_hooks_example_is_a_plugin_that_loads(hook: str) -> None:
    example = ModuleType(f"example_of_{hook}")
    exec(compile(blocks(section(hook), "python")[1], hook, "exec"), vars(example))
    plugins = Plugins()
    plugins.add(example)
    [row] = plugins.report()
    assert row.error is None
    assert row.offers


def test_hooks_are_documented_in_their_order_and_no_others_are() -> None:
    assert tuple(re.findall(r"^### `(\w+)`$", HOOKS_PAGE, re.MULTILINE)) == HOOK_NAMES


@pytest.mark.parametrize(
    "page",
    [page for page in sorted(DOCS.rglob("*.md")) if "<!-- generated: " in page.read_text()],
    ids=lambda page: page.name,
)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert page.read_text() == generate.regenerated(page.read_text()), "run `make fix`"


class AnyModel:
    """Finds every base model, so that the examples' directories need not exist."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @tinsmith.hookimpl
    def tinsmith_resolve_base_model(self, name: str) -> Path:
        return self.directory


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=f"{page.name}-{n}")
        for page in PAGES
        for n, text in enumerate(blocks(page.read_text(), "yaml"))
    ],
)
def test_example_configurations_validate(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = yaml.safe_load(text)
    for model in settings.get("models", []):
        model.pop("path", None)
    file = tmp_path / "tinsmith.yaml"
    file.write_text(yaml.safe_dump(settings))
    loaded = load_settings(
        Plugins.load([AnyModel(tmp_path)]), file=file, environ={}, flags=[Flag("server.data_dir", "d")]
    )
    assert loaded.models


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{target} in {page}"


def test_no_page_has_the_marks_of_a_merge() -> None:
    marks = re.compile("^(<{7}|>{7}) ", re.MULTILINE)
    assert [page for page in PAGES if marks.search(page.read_text())] == []


@pytest.mark.parametrize(
    ("name", "heading"),
    [("threat-model", "## What holds it"), ("rights-and-versions", "## Every operation that waits")],
)
def test_tables_name_tests_that_exist(name: str, heading: str) -> None:
    page = (DOCS / "explanation" / f"{name}.md").read_text()
    rows = re.findall(r"^\|.*\| (.*) \|$", page.partition(heading)[2], re.MULTILINE)
    named = [test for row in rows if row not in {"Test", "---"} for test in re.findall(r"`([^`]+)`", row) or [row]]
    assert len(named) >= 15
    for test in named:
        path, _, function = test.partition("::")
        assert (ROOT / path).is_file(), test
        assert not function or re.search(rf"\bdef {function}\b", (ROOT / path).read_text()), test


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: every page is in the navigation, and every link and anchor leads somewhere."""
    pytest.importorskip("material", reason="needs mkdocs-material")
    into = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(into)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return into


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert not re.findall(r"<(?:script|link|img|iframe)\b[^>]*https?://[^>]*>", page.read_text()), page


def test_the_site_can_be_searched_from_disk(site: Path, tmp_path: Path) -> None:
    """As the README says to open it; browsers allow a page from disk neither workers nor requests."""
    assert (site / "search" / "search_index.js").is_file()
    assert '<script src="iframe-worker/shim.js"' in (site / "index.html").read_text()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium for the rest")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=60000",
        f"--user-data-dir={tmp_path}",
    ]
    address = f"{(site / 'index.html').as_uri()}?q=lease"
    command = [chromium, *options, "--dump-dom", address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert re.search(r"[1-9][0-9]* matching documents", shown)


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda page: page.name)
@pytest.mark.parametrize(
    "answer",
    [
        "how-to/serve-a-model.md",
        "how-to/use-several-gpus.md",
        "how-to/write-a-loss.md",
        "explanation/what-happens-on-a-crash.md",
        "reference/limits.md",
    ],
)
def test_what_newcomers_ask_first_is_one_link_away(page: Path, answer: str) -> None:
    targets = {(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())}
    assert (DOCS / answer).resolve() in targets


def test_the_how_tos_loss_passes_the_contract() -> None:
    example = ModuleType("example_of_a_loss")
    exec(compile(blocks((DOCS / "how-to" / "write-a-loss.md").read_text(), "python")[1], "loss", "exec"), vars(example))
    plugins = Plugins()
    plugins.add(example)
    loss = example.tinsmith_register_losses()
    assert plugins.losses.get(loss.name) == loss
    LossContract().test_derivative_is_that_of_the_loss(loss)
    LossContract().test_config_may_differ_from_token_to_token(loss)


def test_the_how_tos_loss_from_a_paper_passes_the_contract() -> None:
    example = ModuleType("example_from_a_paper")
    exec(compile(blocks((DOCS / "how-to" / "write-a-loss.md").read_text(), "python")[2], "loss", "exec"), vars(example))
    loss, contract = example.SPEC, LossContract()
    for check in (
        contract.test_derivative_is_that_of_the_loss,
        contract.test_every_token_is_on_its_own,
        contract.test_the_loss_grows_in_proportion_to_the_input_that_scales_it,
        contract.test_config_may_differ_from_token_to_token,
        contract.test_shapes_and_precision_are_kept,
        contract.test_extremes_are_finite,
    ):
        check(loss)
    sampled, now = np.array([0.1, 0.1, 0.9, 0.9, 0.5, 0.5]), np.array([0.25, 0.4, 0.7, 0.5, 0.1, 0.9])
    advantages = np.array([1.0, 1.0, -1.0, -1.0, 2.0, -2.0])
    inputs = {"logprobs": np.log(sampled), "advantages": advantages}
    found, slopes = loss.per_token(np, np.log(now), inputs, {"max_move": 0.2 + 1e-9})
    ratios = np.array([2.5, 0.0, 7 / 9, 0.0, 0.2, 1.8])  # 0: too far ahead; behind, a token may be anywhere
    np.testing.assert_allclose(found, -advantages * ratios)
    np.testing.assert_allclose(slopes, -advantages * ratios)


def test_the_how_tos_loss_with_a_sum_passes_the_contract() -> None:
    example = ModuleType("example_of_a_loss")
    exec(compile(blocks((DOCS / "how-to" / "write-a-loss.md").read_text(), "python")[3], "loss", "exec"), vars(example))
    LossContract().test_every_token_is_on_its_own(example.SPEC)
    LossContract().test_shapes_and_precision_are_kept(example.SPEC)


def test_the_tour_names_every_package_and_files_that_exist() -> None:
    tour = (DOCS / "explanation" / "architecture.md").read_text()
    core = ROOT / "core" / "tinsmith"
    packages = {path.parent.name for path in core.glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", tour, re.MULTILINE)) == packages
    files = re.findall(r"`(\w+/[\w/]+\.py)`", tour)
    assert len(files) > 10
    missing = [name for name in files if not (core / name).exists() and not [*ROOT.glob(f"[a-z]*/*/{name}")]]
    assert missing == []


@pytest.mark.thorough  # test_new_plugins.py runs the suite of the first; test_torch_tutorial.py, some of the other's
@pytest.mark.parametrize("page", ["first-backend", "torch-backend"])
def test_the_tutorials_backend_passes_the_contract(page: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    folder = written(page)
    there = {**os.environ, "PYTHONPATH": str(folder)}  # where its workers find it, as if it were installed
    done = subprocess.run(command, cwd=folder, env=there, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_the_tutorial_writes_what_new_plugin_writes(tmp_path: Path) -> None:
    """But for blank lines; the readme is not worth a tutorial, and the training script is not part of the plugin."""
    write_plugin("bigram", PluginKind.BACKEND, tmp_path, installed=())
    written = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    shown = files_of("first-backend")
    assert written.keys() - shown.keys() == {"README.md"}
    assert shown.keys() - written.keys() == {"train.py"}
    for name in written.keys() & shown.keys():
        assert [line for line in shown[name].splitlines() if line] == [
            line for line in written[name].splitlines() if line
        ]


def test_the_tutorials_plugin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tutorial = written("first-backend")
    monkeypatch.syspath_prepend(str(tutorial))
    spec = importlib.util.spec_from_file_location("tutorial_bigram", tutorial / "tinsmith_bigram.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert Plugins.load([module]).backends.get("bigram").needs_model_path is False
