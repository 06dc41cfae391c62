"""Writes a working plugin to start from: a distribution with an entry point, settings, tests and a README."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Final

from tinsmith.errors import UserError
from tinsmith.plugins.registry import PluginReport

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
_LONGEST_NAME: Final = 40


class PluginKind(StrEnum):
    BACKEND = "backend"
    SAMPLER = "sampler"
    STORE = "store"
    SCHEDULER = "scheduler"
    LOSS = "loss"


_CALLED: Final[Mapping[PluginKind, str]] = {
    PluginKind.BACKEND: "training backend",
    PluginKind.SAMPLER: "sampler",
    PluginKind.STORE: "request store",
    PluginKind.SCHEDULER: "scheduler",
    PluginKind.LOSS: "loss function",
}

_USAGE: Final[Mapping[PluginKind, str]] = {
    PluginKind.BACKEND: """\
Select it by its name:

```console
$ tinsmith serve --base-model skeleton-dashed --backend skeleton-dashed --models.0.sampler.plugin none
```

It only trains, so nobody samples (`none`), or a sampler does that you configure beside it.

It brings its own model. To train a Hugging Face model instead, remove `needs_model_path=False` from the spec and read
the directory `context.model_path`.""",
    PluginKind.SAMPLER: """\
It only samples, so it needs a backend that trains the same model, for instance one made with `--kind backend`:

```yaml
models:
  - name: bigram
    backend: {plugin: THE-BACKEND}
    sampler: {plugin: skeleton-dashed}
```

`tinsmith check-plugin skeleton-dashed --trainer THE-BACKEND` also tests the two together.""",
    PluginKind.STORE: """\
Select it in the configuration file:

```yaml
store: {plugin: skeleton-dashed, directory: /fast/local/disk}
```""",
    PluginKind.SCHEDULER: """\
Select it in the configuration file:

```yaml
scheduler: {plugin: skeleton-dashed}
```""",
    PluginKind.LOSS: """\
Once it is installed, every backend that accepts plugin losses can run it:

```python
training.forward_backward(data, "skeleton-dashed", {"gamma": 2.0})
```""",
}


def write_plugin(name: str, kind: PluginKind, directory: Path | None, *, installed: Sequence[PluginReport]) -> Path:
    """Write the distribution and return its directory; by default `tinsmith-NAME` in the current directory.

    Raise UserError if the name is invalid or taken, or if the directory is not empty or cannot be written.
    """
    _check_name(name, kind, installed)
    root = directory or Path(f"tinsmith-{_dashed(name)}")
    if root.is_file() or (root.is_dir() and any(root.iterdir())):
        msg = f"{str(root)!r} exists already; choose another directory with --directory"
        raise UserError(msg)
    try:
        for path, text in _files(name, kind):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
    except OSError as error:
        msg = f"{str(root)!r} cannot be written: {error.strerror}; choose another directory with --directory"
        raise UserError(msg) from error
    return root


def _check_name(name: str, kind: PluginKind, installed: Sequence[PluginReport]) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME or keyword.iskeyword(name):
        msg = (
            f"{name!r} cannot be the name of a plugin; it must start with a letter, consist of at most {_LONGEST_NAME} "
            "lower-case letters, digits and single dashes, and must not be a Python keyword"
        )
        raise UserError(msg)
    for plugin in installed:
        offer = f"{kind} {_dashed(name)}"
        if _dashed(plugin.distribution) == f"tinsmith-{_dashed(name)}" or offer in plugin.offers:
            offers = f" and offers the {offer}" if offer in plugin.offers else ""
            msg = f"{name!r} is taken: {plugin.distribution} {plugin.version} is installed{offers}; choose another name"
            raise UserError(msg)


def _files(name: str, kind: PluginKind) -> Iterator[tuple[str, str]]:
    module = f"tinsmith_{_dashed(name).replace('-', '_')}"
    release = ".".join(version("tinsmith").split(".")[:2])
    for path, source in (
        ("pyproject.toml", "pyproject.toml.template"),
        ("README.md", "README.md.template"),
        (f"{module}.py", f"{kind}.py"),
        ("tests/test_contract.py", f"test_{kind}.template"),
    ):
        text = (resources.files("tinsmith.authoring.skeletons") / source).read_text(encoding="utf-8")
        text = text.replace("USAGE", _USAGE[kind]).replace("KIND", _CALLED[kind])
        yield path, _filled(text.replace("RELEASE", release), name)


def _filled(text: str, name: str) -> str:
    """Replace `skeleton` by the name: unchanged in strings, with underscores in identifiers."""
    dashed = _dashed(name)
    text = text.replace("skeleton-dashed", dashed).replace('"skeleton"', f'"{dashed}"')
    text = text.replace("plugin: skeleton", f"plugin: {dashed}")
    text = text.replace("Skeleton", "".join(part.capitalize() for part in dashed.split("-")))
    return text.replace("skeleton", dashed.replace("-", "_"))


def _dashed(name: str) -> str:
    return name.replace("_", "-")
