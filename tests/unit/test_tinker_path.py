"""tinker:// paths: three parts, and never out of the checkpoint directory."""

from pathlib import PurePosixPath

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import UserError


@pytest.mark.parametrize(
    ("segment", "kind"), [("weights", "training"), ("sampler_weights", "sampler"), ("external_weights", "external")]
)
def test_parts(segment: str, kind: str) -> None:
    path = TinkerPath.parse(f"tinker://s-1:train:0/{segment}/000100")
    assert (path.model_id, path.kind, path.name) == ("s-1:train:0", kind, "000100")
    assert path.checkpoint_id == f"{segment}/000100"
    first, second = path.new_directory(), path.new_directory()
    assert first.startswith(f"s-1:train:0/{segment}/000100~")
    assert first != second, "a directory is never used again"
    assert TinkerPath.of_directory(first) == path == TinkerPath.of_directory(f"s-1:train:0/{segment}/000100")
    assert str(path) == f"tinker://s-1:train:0/{segment}/000100"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tinker://",
        "s:train:0/weights/a",
        "http://s:train:0/weights/a",
        "tinker://s:train:0/weights",
        "tinker://s:train:0/weights/a/b",
        "tinker://s:train:0/other/a",
        "tinker://s:train:0/weights/",
        "tinker:///weights/a",
        "tinker://s:train:0/weights/..",
        "tinker://../weights/a",
        "tinker://s:train:0/weights/.hidden",
        "tinker://s:train:0/weights/a b",
        "tinker://s:train:0/weights/a\n",
        "tinker://s:train:0/weights/a\0",
        "tinker://s:train:0/weights/a\\b",
        "tinker://s:train:0/weights/%2e%2e",
        "tinker://s:train:0/weights/" + "a" * 201,
        "tinker://s:train:0/weights/\u0661",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(UserError):
        TinkerPath.parse(text)


def test_message_names_the_fault() -> None:
    with pytest.raises(UserError, match=r"checkpoint name '\.\.' is not allowed: use 1 to 200 letters"):
        TinkerPath.parse("tinker://s:train:0/weights/..")
    with pytest.raises(UserError, match=r"'nonsense' is not a checkpoint path; expected tinker://"):
        TinkerPath.parse("nonsense")


NAMES = st.text(st.sampled_from("ab0:.-_/\\% \0\n"), max_size=6) | st.text(max_size=10)


@settings(deadline=None, derandomize=True)
@given(NAMES, st.sampled_from(["weights", "sampler_weights", "external_weights"]), NAMES)
def test_whatever_is_accepted_stays_inside(model_id: str, segment: str, name: str) -> None:
    try:
        path = TinkerPath.parse(f"tinker://{model_id}/{segment}/{name}")
    except UserError:
        return
    assert PurePosixPath(path.new_directory()).parts[:-1] == (model_id, segment)
    assert TinkerPath.of_directory(path.new_directory()) == path
    assert not any(part.startswith(".") for part in (model_id, name))
    assert TinkerPath.parse(str(path)) == path
