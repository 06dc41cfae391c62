"""What a tokenizer's files say is honoured, or refused by name; every field that is known has a status."""

import ast
import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import syntax_trees
from tokenizers import Tokenizer, models

from tinsmith.errors import ConfigError
from tinsmith_checkpoints.huggingface import StopRules, read_tokenizer, special_tokens, tokenizer_config
from tinsmith_checkpoints.huggingface.fields import ANNOUNCEMENTS
from tinsmith_checkpoints.huggingface.tiny_tokenizer import train_tokenizer
from tinsmith_checkpoints.huggingface.tokenizer_fields import (
    ADDED_TOKEN_FIELDS,
    GENERATION_CONFIG_FIELDS,
    TOKENIZER_CONFIG_FIELDS,
    TOKENIZER_FIELDS,
    TOKENIZER_MODEL_FIELDS,
)

TEXT = "The quick brown fox jumps over the lazy dog. " * 20
MODELS = ("BPE", "WordPiece", "WordLevel", "Unigram")


def in_transformers(module: str, name: str, method: str = "__init__") -> ast.AST:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = syntax_trees.tree_of(Path(spec.origin).parent / module)
    [found] = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == name]
    return next(each for each in found.body if isinstance(each, ast.FunctionDef) and each.name == method)


def keywords_read(function: ast.AST) -> Iterator[str]:
    """Yield the names in `kwargs.get(...)`, `kwargs.pop(...)` and `"..." in kwargs`."""
    for each in ast.walk(function):
        match each:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="kwargs"), attr="get" | "pop")):
                name = each.args[0]
            case ast.Compare(left=ast.Constant() as name, comparators=[ast.Name(id="kwargs")]):
                pass
            case _:
                continue
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(train_tokenizer("qwen3", 300).to_str())
    return parsed


def written(directory: Path, content: dict[str, Any], **config: Any) -> Path:
    (directory / "tokenizer.json").write_text(json.dumps(content))
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def read(directory: Path, content: dict[str, Any], **config: Any) -> Tokenizer:
    found = read_tokenizer(written(directory, content, **config))
    assert found is not None
    return found


def test_every_field_of_a_tokenizer_has_a_status() -> None:
    made = [json.loads(Tokenizer(getattr(models, name)()).to_str()) for name in MODELS]
    assert {name for each in made for name in each} == TOKENIZER_FIELDS.fields.keys()
    assert {name for each in made for name in each["model"]} == TOKENIZER_MODEL_FIELDS.fields.keys()
    with_token = Tokenizer(models.BPE())
    with_token.add_special_tokens(["<a>"])
    assert json.loads(with_token.to_str())["added_tokens"][0].keys() == ADDED_TOKEN_FIELDS.fields.keys()


def test_every_field_of_tokenizer_configs_that_transformers_reads_has_a_status() -> None:
    base, fast = (
        ("tokenization_utils_base.py", "PreTrainedTokenizerBase"),
        ("tokenization_utils_tokenizers.py", "TokenizersBackend"),
    )
    known = {*keywords_read(in_transformers(*base)), *keywords_read(in_transformers(*fast))}
    assert {"split_special_tokens", "add_bos_token", "model_max_length"} <= known
    assert known <= TOKENIZER_CONFIG_FIELDS.fields.keys()


def test_every_field_of_generation_configs_has_a_status() -> None:
    known = set(keywords_read(in_transformers("generation/configuration_utils.py", "GenerationConfig")))
    assert {"temperature", "suppress_tokens", "eos_token_id"} <= known
    assert known <= GENERATION_CONFIG_FIELDS.fields.keys()


def test_a_text_is_neither_cut_nor_padded(tmp_path: Path, plain: dict[str, Any]) -> None:
    limits = Tokenizer(models.BPE())
    limits.enable_truncation(32)
    limits.enable_padding(length=1000)
    cutting = json.loads(limits.to_str())
    whole = Tokenizer.from_str(json.dumps(plain)).encode(TEXT).ids
    assert len(whole) > 32
    for given in ({"truncation": cutting["truncation"]}, {"padding": cutting["padding"]}):
        content = {**plain, **given}
        assert len(Tokenizer.from_str(json.dumps(content)).encode(TEXT).ids) != len(whole)
        assert read(tmp_path, content).encode(TEXT).ids == whole
        assert StopRules.of_model(tmp_path).tokenizer.encode(TEXT).ids == whole  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {"dropout": 0.1}}, "dropout is 0.1: "),
        ({"model": {"type": "Neural"}}, "type is 'Neural': "),
        ({"model": {"newest": True}}, "newest is not known here"),
        ({"newest": [1]}, "newest is not known here"),
        ({"version": "2.0"}, "version is '2.0': "),
        ({"normalizer": {"type": "NFC", "form": 7}}, "ignores normalizer.form"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace", "deep": 1}]}},
            "ignores pre_tokenizer.pretokenizers[0].deep",
        ),
        ({"decoder": {"type": "Fuse", "more": "x"}}, "ignores decoder.more"),
        ({"normalizer": {"type": "Unheard"}}, "cannot be read as a tokenizer"),
        ({"added_tokens": [{"id": 0, "content": "<a>", "rank": 4}]}, "rank is not known here"),
        ({"added_tokens": [1]}, "cannot be read as a tokenizer"),
    ],
)
def test_what_the_library_would_ignore_or_draw_is_refused_by_name(
    tmp_path: Path, plain: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    content = {**plain, **change}
    if isinstance(change.get("model"), dict):
        content["model"] = {**plain["model"], **change["model"]}
    with pytest.raises(ConfigError, match=r"tokenizer\.json") as refusal:
        read(tmp_path, content)
    assert named in str(refusal.value)


def test_fields_under_their_former_names_and_empty_ones_are_taken(tmp_path: Path, plain: dict[str, Any]) -> None:
    former = {"type": "Metaspace", "replacement": "_", "add_prefix_space": True, "str_rep": "_"}
    read(tmp_path, {**plain, "pre_tokenizer": former, "normalizer": {"type": "NFC", "unset": None}})
    read(tmp_path, {**plain, "model": {**plain["model"], "dropout": 0.0}})


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"model": 3}'])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer.json.* cannot be read as a tokenizer"):
        read_tokenizer(tmp_path)


def test_special_tokens_are_split_if_the_file_says_so(tmp_path: Path, plain: dict[str, Any]) -> None:
    special = plain["added_tokens"][0]["content"]
    assert len(read(tmp_path, plain).encode(special).ids) == 1
    assert len(read(tmp_path, plain, split_special_tokens=True).encode(special).ids) > 1


@pytest.mark.parametrize(
    "field", ["fix_mistral_regex", "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"]
)
def test_what_would_change_texts_is_refused_by_name(tmp_path: Path, plain: dict[str, Any], field: str) -> None:
    read(tmp_path, plain, **{field: False})
    with pytest.raises(ConfigError, match=f"{field} is True"):
        read(tmp_path, plain, **{field: True})


def test_the_map_of_special_tokens_counts_where_it_counts_in_transformers(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<map>"}}))
    assert special_tokens(tokenizer_config(tmp_path)) == {"eos_token": "<map>"}
    config = {"eos_token": "<config>", "image_token": "<image>", "extra_special_tokens": {"audio_token": "<audio>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert special_tokens(tokenizer_config(tmp_path))["eos_token"] == "<map>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": {}}))
    named = {"eos_token": "<config>", "image_token": "<image>", "audio_token": "<audio>"}
    assert special_tokens(tokenizer_config(tmp_path)) == named


def test_unknown_fields_are_announced_once(
    tmp_path: Path, plain: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "newest": 0.5, "top_k": 3}))
    written(tmp_path, plain, vendors="own", image_token="<image>", top=None)
    with caplog.at_level(logging.WARNING, ANNOUNCEMENTS.name):
        for _ in range(2):
            assert StopRules.of_model(tmp_path).eos_tokens >= {1, 2}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "generation_config.json has fields that nothing here reads: newest;" in said[0]
    assert "tokenizer_config.json has fields that nothing here reads: vendors;" in said[1]


@pytest.mark.parametrize("eos", ["</s>", True, [1, "2"], 1.5])
def test_an_end_that_is_no_token_is_refused_by_name(tmp_path: Path, eos: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match="eos_token_id is "):
        StopRules.of_model(tmp_path)


def test_a_token_whose_number_is_none_is_refused(tmp_path: Path, plain: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="added_tokens_decoder has 'x'"):
        read(tmp_path, plain, added_tokens_decoder={"x": {"content": "<x>"}})
