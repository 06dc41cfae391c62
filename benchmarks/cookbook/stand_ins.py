"""Small data sets with the columns, configurations and splits of those that the cookbook loads from the hub."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from tokenizers import AddedToken

from tinsmith_checkpoints.huggingface.tiny_tokenizer import train_tokenizer

Rows = list[dict[str, Any]]
_TOPICS: Final = ("the moon", "rivers", "old houses", "prime numbers", "bread", "the alphabet", "maps", "birds")
_HELD_OUT: Final = 1024  # rows that recipes take for their evaluation, whatever there is
_ANSWERS: Final = ("1", "2")
_ANSWER_TOKENS: Final = 64
_TAGS: Final = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
)


def _messages(number: int) -> list[dict[str, str]]:
    topic = _TOPICS[number % len(_TOPICS)]
    return [
        {"role": "user", "content": f"Tell me about {topic}, number {number}."},
        {"role": "assistant", "content": f"This is about {topic}."},
    ]


def _conversations(number: int) -> Rows:
    return [{"messages": _messages(each), "source": "stand-in"} for each in range(number)]


def _problems(number: int) -> Rows:
    return [
        {
            "problem": f"What is {each} modulo 2, plus 1?",
            "question": f"What is {each} modulo 2, plus 1?",
            "solution": f"We add. The answer is $\\boxed{{{_ANSWERS[each % 2]}}}$.",
            "answer": f"We add.\n#### {_ANSWERS[each % 2]}",
            "final_answer": _ANSWERS[each % 2],
        }
        for each in range(number)
    ]


def _comparisons(number: int) -> Rows:
    start = "\n\nHuman: Tell me about {}, number {}.\n\nAssistant: "
    asked = [start.format(_TOPICS[each % len(_TOPICS)], each) for each in range(number)]
    return [{"chosen": f"{each}It is nice.", "rejected": f"{each}No."} for each in asked]


def _thoughts(number: int) -> Rows:
    names = {"user": "human", "assistant": "gpt"}
    return [
        {"conversations": [{"from": names[said["role"]], "value": said["content"]} for said in _messages(each)]}
        for each in range(number)
    ]


def _choices(number: int) -> Rows:
    return [
        {
            "question": f"Which number follows {each}?",
            "choices": {"label": ["A", "B"], "text": [str(each + 1), str(each + 2)]},
            "answerKey": "A",
            "domain": "Chemistry",
            "type": "mcq-4-choices",
            "details": {"level": "L3"},
        }
        for each in range(number)
    ]


def _feedback(number: int) -> Rows:
    scores = {f"orig_score{each}_description": f"It deserves {each}." for each in range(1, 6)}
    return [
        {
            "orig_instruction": _messages(each)[0]["content"],
            "orig_criteria": "Is the answer short?",
            "orig_reference_answer": "Yes.",
            **scores,
        }
        for each in range(number)
    ]


def _code(number: int) -> Rows:
    return [
        {
            "problem": f"Read a number and print it plus {each}.",
            "tests": json.dumps([{"input": "1\n", "output": f"{each + 1}\n", "testtype": "stdin_stdout"}]),
            "metadata": "{}",
            "starter_code": "",
        }
        for each in range(number)
    ]


def _texts(number: int) -> Rows:
    return [{"text": f"The story of {_TOPICS[each % len(_TOPICS)]} has {each} parts."} for each in range(number)]


_Splits = Mapping[str, Callable[[], Rows]]
DATA_SETS: Final[Mapping[str, Mapping[str, _Splits]]] = {
    "HuggingFaceH4/no_robots": {"default": {"train": lambda: _conversations(256), "test": lambda: _conversations(8)}},
    "allenai/tulu-3-sft-mixture": {"default": {"train": lambda: _conversations(_HELD_OUT + 64)}},
    "openai/gsm8k": {"main": {"train": lambda: _problems(256), "test": lambda: _problems(8)}},
    "HuggingFaceH4/MATH-500": {"default": {"test": lambda: _problems(8)}},
    "zwhe99/DeepMath-103K": {"default": {"train": lambda: _problems(64)}},
    "Anthropic/hh-rlhf": {"default": {"train": lambda: _comparisons(64), "test": lambda: _comparisons(_HELD_OUT)}},
    "open-thoughts/OpenThoughts3-1.2M": {"default": {"train": lambda: _thoughts(64)}},
    "hicai-zju/SciKnowEval": {"default": {"test": lambda: _choices(40)}},
    "prometheus-eval/Feedback-Collection": {"default": {"train": lambda: _feedback(1100)}},
    "agentica-org/DeepCoder-Preview-Dataset": {
        **{name: {"train": lambda: _code(8)} for name in ("primeintellect", "taco")},
        "lcbv5": {"train": lambda: _code(8), "test": lambda: _code(4)},
        "codeforces": {"test": lambda: _code(4)},
    },
    "Salesforce/wikitext": {"wikitext-103-raw-v1": {"train": lambda: _texts(20_000)}},
}
"""By name, configuration and split."""
CALTECH: Final = "dpdl-benchmark/caltech101"
PINNED: Final = {"openai/gsm8k": "cc7b047b6e5bb11b4f1af84efc572db110a51b3c"}
"""A commit that inspect-evals asks for, by name of the data set."""


def write_tokenizer(file: Path, vocab_size: int) -> None:
    """Write one with the tags of Qwen's renderers, and with many tokens that are each an answer to `_problems`.

    A model with random weights then gives right answers and wrong ones. Recipes train on nothing if all are wrong.
    """
    tokenizer = train_tokenizer("qwen3", vocab_size - _ANSWER_TOKENS - len(_TAGS))
    layouts = [f"\\boxed{{{' ' * (each // 2)}{_ANSWERS[each % 2]}}}" for each in range(_ANSWER_TOKENS)]
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in _TAGS])
    tokenizer.add_tokens([AddedToken(layout, normalized=False) for layout in layouts])
    tokenizer.save(str(file))


def write_data_set(directory: Path, configurations: Mapping[str, _Splits]) -> None:
    """Write it as the hub stores data sets: files of rows, and in README.md which is what."""
    directory.mkdir(parents=True)
    described: list[dict[str, Any]] = []
    for name, splits in configurations.items():
        files = {split: f"{name}/{split}.jsonl" for split in splits}
        (directory / name).mkdir()
        for split, rows in splits.items():
            _write_lines(directory / files[split], rows())
        data_files = [{"split": split, "path": file} for split, file in files.items()]
        described.append({"config_name": name, "data_files": data_files, "default": not described})
    (directory / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': described})}---\n")


def write_markets(file: Path, number: int = 8) -> None:
    """Write a table in the form of Prophet Arena's: half of the markets before its date of the split, half after."""
    months = ("2025-09", "2025-11")
    rows = [
        {
            "submission_id": f"s{each}",
            "event_ticker": f"E{each}",
            "title": f"Event {each}",
            "snapshot_time": f"{months[each % 2]}-01T00:00:00",
            "close_time": f"{months[each % 2]}-10T00:00:00",
            "market_outcome": json.dumps({"It rains": each // 2 % 2}),
            "category": "weather",
            "markets": json.dumps(["It rains"]),
            "sources": json.dumps([{"title": "A forecast", "summary": "Clouds.", "source_id": 1, "ranking": 1}]),
        }
        for each in range(number)
    ]
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


ENVIRONMENT: Final = """\
import verifiers
from datasets import Dataset

TEXTS = [f"text number {number}" for number in range(16)]


def load_environment(**_):
    rows = [{"question": f"Reverse: {text}", "answer": text[::-1]} for text in TEXTS]
    rubric = verifiers.Rubric(funcs=[length], weights=[1.0])
    return verifiers.SingleTurnEnv(dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows), rubric=rubric)


def length(completion, **_):
    return len(str(completion)) % 7 / 7
"""
"""A module in place of the environment `reverse-text`. Its reward differs between answers."""

PAPERS_DATA: Final = """\
import sys
from datasets import Dataset

asked = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Which? A: this, B: that"}]
golden = "<reasoning>Clearly this.</reasoning><answer>A</answer>"
tool = {"prompt": "Call a tool.", "golden_response": ["Action: tool"], "golden_answer": [{"Action": "tool"}]}
rows = {
    "science_data/train_data": {"messages": asked, "output_text": golden},
    "science_data/eval_data": {"prompt": asked, "answer": "A"},
    "tooluse_data/train_data": tool,
    "tooluse_data/eval_data": tool,
}
for name, row in rows.items():
    Dataset.from_list([row] * 8).save_to_disk(f"{sys.argv[1]}/{name}")
"""
"""A program that writes data in the form of the repository of the paper on self-distillation, which recipes read."""


IMAGE_PROCESSOR: Final = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 1024, "longest_edge": 65536},
}
"""preprocessor_config.json of a model that sees."""

PICTURES: Final = """\
import pathlib, sys
from PIL import Image

for split in ("train", "test"):
    for number, label in enumerate(("cat", "dog")):
        directory = pathlib.Path(sys.argv[1], split, label)
        directory.mkdir(parents=True)
        for each in range(8):
            Image.new("RGB", (64, 64), (100 * number, 20 * each, 50)).save(directory / f"{each}.png")
"""
"""A program that writes a data set of pictures."""


def write_conversations(file: Path) -> None:
    _write_lines(file, _conversations(16))


def _write_lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
