"""A tokenizer from files gives the tokens that transformers gives for the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tinsmith_checkpoints.huggingface import read_tokenizer
from tinsmith_checkpoints.huggingface.tiny_tokenizer import train_tokenizer

TEXT = "<s>Hello <new> world</s> <tool> <extra>, and <|im_end|>  <later> 1234<pad> again. <image>"

CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "tokens with numbers": {
        "added_tokens_decoder": {
            "300": {
                "content": "<new>",
                "lstrip": True,
                "rstrip": False,
                "single_word": False,
                "normalized": False,
                "special": True,
            },
            "299": {
                "content": "<later>",
                "lstrip": False,
                "rstrip": True,
                "single_word": True,
                "normalized": True,
                "special": False,
            },
        }
    },
    "named tokens": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"},
    "further tokens": {"additional_special_tokens": ["<tool>", "<new>"], "eos_token": "<|im_end|>"},
    "a dictionary of tokens": {"extra_special_tokens": {"tool_token": "<tool>"}, "bos_token": "<s>"},
    "a beginning": {"bos_token": "<s>", "add_bos_token": True, "add_eos_token": True, "eos_token": "</s>"},
    "split": {"bos_token": "<s>", "split_special_tokens": True},
    "limits": {"model_max_length": 4, "padding_side": "left", "truncation_side": "left"},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("limited", [False, True], ids=["", "limited"])
@pytest.mark.parametrize("mapped", [False, True], ids=["", "mapped"])
def test_the_tokens_are_the_same(tmp_path: Path, config: dict[str, Any], limited: bool, mapped: bool) -> None:
    tokenizer = train_tokenizer("qwen3", 300)
    if limited:
        tokenizer.enable_truncation(6)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    if mapped:
        (tmp_path / "special_tokens_map.json").write_text(
            json.dumps({"cls_token": "<new>", "sep_token": {"content": "<s>"}})
        )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = read_tokenizer(tmp_path)
    assert ours is not None
    for special in (True, False):
        assert ours.encode(TEXT, add_special_tokens=special).ids == theirs.encode(TEXT, add_special_tokens=special)
