"""The tiny model: made without a framework, read by transformers, the same bytes for the same seed."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tinsmith.errors import UserError
from tinsmith_checkpoints.huggingface import TINY_CLASSES
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

SMALL = TinyShape(hidden_size=32, intermediate_size=48, num_layers=2, head_dim=16, num_heads=2, num_kv_heads=1)
TEXT = "English: quantum physics\nPig Latin: uantum-qay ysics-phay, naive cafe 42 \u00e9\u4f60"


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM",
}


SHORT = ("Gemma3ForCausalLM", "Qwen3_5MoeForConditionalGeneration")


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        *[("qwen3", True), ("llama", False), ("qwen2", True), ("mistral", False)],
        *(
            pytest.param(name, bool(number % 2), marks=() if name in SHORT else pytest.mark.thorough)
            for number, name in enumerate(TINY_CLASSES)
        ),
    ],
)
def test_transformers_reads_it(tmp_path: Path, family: str, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    shape = replace(SMALL, family=family, tied=tied)
    num_parameters = write_tiny_model(tmp_path, shape)
    class_name = CLASSES.get(family, family)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [class_name]
    model, report = getattr(transformers, class_name).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert model.num_parameters() == num_parameters
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    assert len(tokenizer) == shape.vocab_size
    assert max(ids) < shape.vocab_size
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert prompt["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
    assert torch.isfinite(logits).all()


def test_the_same_seed_gives_the_same_files_in_any_process(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "here", SMALL)
    code = (
        "import sys, pathlib; from tinsmith_checkpoints.huggingface.tiny_model import *;"
        "write_tiny_model(pathlib.Path(sys.argv[1]), TinyShape(hidden_size=32, intermediate_size=48, num_layers=2,"
        " head_dim=16, num_heads=2, num_kv_heads=1)); assert 'torch' not in sys.modules"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, env=environ, timeout=300)
    assert files(tmp_path / "here") == files(tmp_path / "there")
    write_tiny_model(tmp_path / "other", replace(SMALL, seed=1))
    differs = [name for name, data in files(tmp_path / "other").items() if data != files(tmp_path / "here")[name]]
    assert differs == ["model.safetensors"]


def test_it_overwrites_only_when_told(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, SMALL)
    with pytest.raises(UserError, match="is not empty; choose another directory, or overwrite it with --force"):
        write_tiny_model(tmp_path, SMALL)
    write_tiny_model(tmp_path, replace(SMALL, vocab_size=600), overwrite=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; it must be at least 1"),
        ({"family": "gpt"}, "no family 'gpt', known: qwen3, llama"),
        ({"num_heads": 3, "num_kv_heads": 2}, "must be a multiple"),
        ({"family": "qwen2", "head_dim": 8}, "hidden_size is 32; in the family 'qwen2' it is num_heads"),
        ({"head_dim": 5}, "rotary positions need an even one"),
        ({"vocab_size": 256}, "needs at least 300"),
        ({"settings": {"sliding_window": 8}}, "settings are for classes of transformers"),
    ],
)
def test_impossible_shapes_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        write_tiny_model(tmp_path / "model", replace(SMALL, **changes))


@pytest.mark.parametrize("vocab_size", [300, 512, pytest.param(8192, marks=pytest.mark.thorough)])
def test_any_vocabulary_size_is_met_exactly(tmp_path: Path, vocab_size: int) -> None:
    write_tiny_model(tmp_path, replace(SMALL, vocab_size=vocab_size))
