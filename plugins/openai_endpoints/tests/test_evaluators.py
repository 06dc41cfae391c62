"""lm-eval and Inspect on a trained adapter and its base model: the commands of a page, on files made here.

    TINSMITH_EVALUATORS=evaluators/bin pytest plugins/openai_endpoints/tests/test_evaluators.py

By default they are looked for beside this Python. Several directories are divided by colons.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import openai
import pytest
import tinker
from openai_served import checkpoint, write_tiny_chat_model
from tokenizers import Tokenizer

from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import running_server
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # what the SDK leaves open is its business
]

PAGE: Final = Path(__file__).parents[3] / "docs" / "how-to" / "use-openai-clients.md"
PROGRAMS: Final = os.environ.get("TINSMITH_EVALUATORS", str(Path(sys.executable).parent))
KEY: Final = "tml-ann"
SHAPE: Final = TinyShape(vocab_size=512, num_layers=1, hidden_size=16)
LIMIT_S: Final = 600
QUESTIONS: Final = [
    {"question": "the quick brown", "choices": [" fox jumps", " lazy dog"], "label": 0, "answer": "fox"},
    {"question": "A model learns", "choices": [" from examples", " the moon"], "label": 1, "answer": "moon"},
]
CHOICE: Final = """\
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WORDS: Final = """\
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["e"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
INSPECT: Final = """\
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash

@task
def words():
    dataset = json_dataset("questions.jsonl", FieldSpec(input="question", target="answer"))
    return Task(dataset=dataset, solver=[use_tools(bash()), generate()], scorer=includes())
"""


@dataclass(frozen=True)
class Served:
    url: str
    path: str
    model: Path
    service: tinker.ServiceClient

    def environment(self) -> dict[str, str]:
        """Return what the commands need. Nothing is asked of a hub."""
        return {
            **os.environ,
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
            "URL": self.url,
            "MODEL": self.path,
            "TOKENIZER": str(self.model),
            "TINKER_API_KEY": KEY,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
        }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("evaluated")
    write_tiny_chat_model(directory / "model", SHAPE)
    backend = {"plugin": "toy", "vocab_size": SHAPE.vocab_size, "max_context_tokens": 2048}
    model = ModelSettings(name="tiny", path=directory / "model", backend=PluginSection.model_validate(backend))
    with running_server(directory / "data", models=[model]) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        training = service.create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
        tokens = Tokenizer.from_file(str(directory / "model" / "tokenizer.json")).encode("the quick brown fox " * 4).ids
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        for _ in range(8):
            training.forward_backward([datum], "cross_entropy").result()
            training.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
        yield Served(server.url, checkpoint(training, "a"), directory / "model", service)
        service.close("success").result()


def command(program: str, containing: str) -> str:
    """Return the command of the page that runs a program with something."""
    if shutil.which(program, path=PROGRAMS) is None:
        pytest.skip(f"{program} is not in {PROGRAMS}; {PAGE.name} says how to install it")
    [block] = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = block.replace("\\\n", " ").splitlines()
    [found] = [line for line in lines if program in shlex.split(line) and containing in line]
    return found


def run(line: str, served: Served, directory: Path, **more: str) -> None:
    (directory / "questions.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in QUESTIONS))
    variables = {**served.environment(), "HF_HOME": str(directory / "hub"), **more}
    ran = subprocess.run(
        ["bash", "-euc", line],
        cwd=directory,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout


def samples(directory: Path, task: str) -> list[Any]:
    """Return what lm-eval asked and got, in the order of the questions."""
    [file] = directory.rglob(f"samples_{task}_*.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda sample: int(sample["doc_id"]))


@pytest.mark.parametrize("trained", [True, False])
def test_lm_eval_scores_choices_with_the_sdks_logprobs(served: Served, tmp_path: Path, trained: bool) -> None:
    """Of an adapter, and of the base model."""
    (tmp_path / "choice.yaml").write_text(CHOICE)
    run(
        command("lm-eval", "local-completions"),
        served,
        tmp_path,
        TASKS="choice",
        MODEL=served.path if trained else "tiny",
    )
    model = {"model_path": served.path} if trained else {"base_model": "tiny"}
    sampler = served.service.create_sampling_client(**model).result()
    tokenizer = Tokenizer.from_file(str(served.model / "tokenizer.json"))
    for sample, question in zip(samples(tmp_path, "choice"), QUESTIONS, strict=True):
        for choice, [logprob, _is_greedy] in zip(question["choices"], sample["filtered_resps"], strict=True):  # type: ignore[call-overload]
            prompt = tokenizer.encode(str(question["question"])).ids
            whole = tokenizer.encode(f"{question['question']}{choice}").ids
            scores = sampler.compute_logprobs(tinker.ModelInput.from_ints(whole)).result()
            assert whole[: len(prompt)] == prompt
            assert float(logprob) == pytest.approx(sum(scores[len(prompt) :]), abs=1e-3)


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_lm_eval_generates_what_openais_client_gets(served: Served, tmp_path: Path, kind: str) -> None:
    (tmp_path / "words.yaml").write_text(WORDS)
    run(command("lm-eval", kind), served, tmp_path, TASKS="words")
    answers = {}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:
        asked: Mapping[str, Any] = {"model": served.path, "temperature": 0, "max_tokens": 8}
        for question in (str(each["question"]) for each in QUESTIONS):
            if kind == "local-completions":
                stops = ["e", "<|im_end|>"]  # lm-eval adds the end of the tokenizer's texts
                answers[question] = client.completions.create(**asked, prompt=question, stop=stops).choices[0].text
            else:
                messages: Any = [{"role": "user", "content": question}]
                got = client.chat.completions.create(**asked, messages=messages, stop=["e"])
                answers[question] = got.choices[0].message.content or ""
    found = {sample["doc"]["question"]: sample["filtered_resps"][0] for sample in samples(tmp_path, "words")}
    assert found == answers


@pytest.mark.parametrize("provider", ["openai-api/local", "anthropic/local"])
def test_inspect_runs_a_task_with_a_tool(served: Served, tmp_path: Path, provider: str) -> None:
    (tmp_path / "words.py").write_text(INSPECT)
    run(command("inspect", provider), served, tmp_path, TASK="words.py")
    [file] = (tmp_path / "logs").glob("*.json")
    log = json.loads(file.read_text())
    assert (log["status"], len(log["samples"])) == ("success", len(QUESTIONS))
    for sample in log["samples"]:
        (answer,) = [message for message in sample["messages"] if message["role"] == "assistant"]
        assert answer["content"]
        assert answer["model"] == served.path
        assert 0 < sample["output"]["usage"]["output_tokens"] <= 256
