"""LiteLLM, Inspect, verifiers, OpenAI's Agents SDK and Claude Code on a base model: their own code judges the answers.

    TINSMITH_EVALUATORS=evaluators/bin pytest plugins/openai_endpoints/tests/test_agents.py

Programs are looked for as in `test_evaluators`: in these directories, by the Python there that can import the package.
Tried with LiteLLM 1.110.2, Inspect 0.3.285, verifiers 0.4.0, openai-agents 0.24.0 and Claude Code 2.1.197.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from openai_served import write_tiny_chat_model

from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape

pytestmark = pytest.mark.thorough

DIRECTORIES: Final = os.environ.get("TINSMITH_EVALUATORS", str(Path(sys.executable).parent)).split(":")
SHAPE: Final = TinyShape(vocab_size=512, num_layers=1, hidden_size=16)
CONTEXT: Final = 2048
LIMIT_S: Final = 600
BEGIN: Final = """\
import asyncio, json, os
URL, KEY, MODEL = os.environ["URL"], os.environ["KEY"], os.environ["MODEL"]
HI = [{"role": "user", "content": "hi"}]
LONG = [{"role": "user", "content": "a long story " * 5000}]
"""
LITELLM: Final = """
import litellm
litellm.suppress_debug_info = True
BASES = {"openai": f"{URL}/v1", "anthropic": f"{URL}/anthropic/api"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "adds", "parameters": PARAMETERS}

def ask(provider, **more):
    asked = {"model": f"{provider}/{MODEL}", "api_base": BASES[provider], "api_key": KEY, "max_retries": 0,
             "messages": HI, "max_tokens": 4, "temperature": 0, **more}
    try:
        answer = litellm.completion(**asked)
        if more.get("stream"):
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer) and "text"
        if answer.usage.completion_tokens > 4 or not answer.choices[0].message.content:
            return "no answer"
        return "text"
    except Exception as error:
        return type(error).__name__

found = {}
for provider in BASES:
    echo = litellm.completion(
        model=f"{provider}/{MODEL}", api_base=BASES[provider], api_key=KEY, messages=HI, max_tokens=4, temperature=0
    ).choices[0].message
    found[provider] = {
        "plain": ask(provider),
        "stream": ask(provider, stream=True),
        "tools": ask(provider, tools=[{"type": "function", "function": FUNCTION}], tool_choice="auto"),
        "sampling": ask(provider, top_p=0.9, stop=["zz"]),
        "echo": ask(provider, messages=[*HI, echo.model_dump(), *HI]),
        "long prompt": ask(provider, messages=LONG),
        "long answer": ask(provider, max_tokens=100_000),
        "no model": ask(provider, model=f"{provider}/absent"),
        "no key": ask(provider, api_key="none"),
        "not offered": ask(provider, extra_body={"min_p": 0.5}),
    }
print(json.dumps(found))
"""
AGENTS: Final = """
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI, BadRequestError
set_tracing_disabled(True)

@function_tool
def add(a: int, b: int) -> int:
    "Adds."
    return a + b

async def main():
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        model = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
        settings = ModelSettings(max_tokens=8, temperature=0)
        agent = Agent(name="a", instructions="be brief", model=model, tools=[add], model_settings=settings)
        first = await Runner.run(agent, "hi")
        later = await Runner.run(agent, [*first.to_input_list(), *HI])
        streamed = Runner.run_streamed(agent, "hi")
        async for _ in streamed.stream_events():
            pass
        found = {"texts": [bool(each.final_output) for each in (first, later, streamed)]}
        found["tokens"] = first.context_wrapper.usage.output_tokens
        try:
            await Runner.run(agent, LONG)
        except BadRequestError as error:
            found["long prompt"] = error.code
        print(json.dumps(found))

asyncio.run(main())
"""
VERIFIERS: Final = """
import openai
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.dialects.anthropic import AnthropicDialect
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.harnesses.utils.compaction import discover_threshold, is_context_overflow
from verifiers.v1.types import SamplingConfig

async def main():
    found = {}
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        found["threshold"] = await discover_threshold(client, MODEL)
        for name, messages, most in (("long prompt", LONG, 4), ("long answer", HI, 100_000)):
            try:
                await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=most)
            except openai.APIStatusError as error:
                found[name] = is_context_overflow(error)
    for name, base, dialect in (("chat", "/v1", ChatDialect()), ("anthropic", "/anthropic/api", AnthropicDialect())):
        client = EvalClient(EvalClientConfig(base_url=URL + base, api_key_var="KEY"))
        body = {"model": MODEL, "messages": HI, "max_tokens": 4, "temperature": 0}
        answer = await client.get_response(dialect, body, SamplingConfig(max_tokens=4))
        found[name] = [answer.finish_reason, answer.usage.completion_tokens]
        try:
            await client.get_response(dialect, {**body, "model": "absent"}, SamplingConfig())
        except ProviderError as error:
            found[f"{name}, no model"] = error.status_code
    print(json.dumps(found))

asyncio.run(main())
"""
INSPECT: Final = """
from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model

async def main():
    found = {}
    for provider, base in (("openai-api/local", f"{URL}/v1"), ("anthropic", f"{URL}/anthropic/api")):
        name = f"{provider}/{MODEL}"
        model = get_model(name, base_url=base, api_key=KEY, config=GenerateConfig(max_retries=0))
        found[provider] = []
        for text, most in (("hi", 4), (LONG[0]["content"], 4), ("hi", 100_000)):
            config = GenerateConfig(max_tokens=most, temperature=0)
            answer = await model.generate([ChatMessageUser(content=text)], config=config)
            found[provider].append(answer.stop_reason)
    print(json.dumps(found))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("agents")
    write_tiny_chat_model(directory / "model", SHAPE)
    backend = {"plugin": "toy", "vocab_size": SHAPE.vocab_size, "max_context_tokens": CONTEXT}
    model = ModelSettings(name="tiny", path=directory / "model", backend=PluginSection.model_validate(backend))
    with running_server(directory / "data", models=[model]) as server:
        yield server


def found_by(package: str, script: str, server: RunningServer) -> Any:
    """Return what a script prints. Nothing is asked of other hosts."""
    variables = {
        **os.environ,
        "URL": server.url,
        "KEY": "tml-ann",
        "MODEL": "tiny",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LOCAL_API_KEY": "tml-ann",
        "ANTHROPIC_API_KEY": "tml-ann",
        "HF_HUB_OFFLINE": "1",
    }
    ran = subprocess.run(
        [python_with(package), "-c", BEGIN + script],
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_claude_code_answers(tmp_path: Path) -> None:
    """Its first request leaves no room for 32,000 tokens, so it asks again by the numbers of the error."""
    claude = next((each / "claude" for each in map(Path, DIRECTORIES) if (each / "claude").exists()), None)
    if claude is None:
        pytest.skip(f"no claude in {':'.join(DIRECTORIES)}; install it with npm, and set TINSMITH_EVALUATORS")
    write_tiny_chat_model(tmp_path / "model", SHAPE)
    backend = {"plugin": "toy", "vocab_size": SHAPE.vocab_size, "max_context_tokens": 1 << 16}
    model = ModelSettings(name="tiny", path=tmp_path / "model", backend=PluginSection.model_validate(backend))
    with running_server(tmp_path / "data", models=[model]) as server:
        ran = subprocess.run(
            [claude, "-p", "say hi", "--output-format", "json"],
            cwd=tmp_path,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "ANTHROPIC_BASE_URL": f"{server.url}/anthropic/api",
                "ANTHROPIC_AUTH_TOKEN": "tml-ann",
                "ANTHROPIC_MODEL": "tiny",
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    answer = json.loads(ran.stdout)
    assert (answer["is_error"], answer["num_turns"]) == (False, 1)
    assert answer["usage"]["output_tokens"] > 0


def python_with(package: str) -> str:
    for directory in DIRECTORIES:
        python = Path(directory) / "python"
        look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
        if python.exists() and subprocess.run([python, "-c", look], check=False).returncode == 0:
            return str(python)
    pytest.skip(f"no Python in {':'.join(DIRECTORIES)} has {package}; install it, and set TINSMITH_EVALUATORS")


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_tells_everything_apart(server: RunningServer, provider: str) -> None:
    assert found_by("litellm", LITELLM, server)[provider] == {
        "plain": "text",
        "stream": "text",
        "tools": "text",
        "sampling": "text",
        "echo": "text",
        "long prompt": "ContextWindowExceededError",
        "long answer": "ContextWindowExceededError",
        "no model": "NotFoundError",
        "no key": "AuthenticationError",
        "not offered": "BadRequestError",
    }


def test_openais_agents_go_on_with_a_conversation(server: RunningServer) -> None:
    found = found_by("agents", AGENTS, server)
    assert found == {"texts": [True] * 3, "tokens": 8, "long prompt": "context_length_exceeded"}


def test_verifiers_asks_in_both_dialects_and_sees_what_is_too_long(server: RunningServer) -> None:
    assert found_by("verifiers", VERIFIERS, server) == {
        "threshold": CONTEXT // 2,
        "long prompt": True,
        "long answer": True,
        "chat": ["length", 4],
        "chat, no model": 404,
        "anthropic": ["length", 4],
        "anthropic, no model": 404,
    }


def test_inspect_stops_a_sample_that_is_too_long(server: RunningServer) -> None:
    """As one that ended, rather than one that failed."""
    expected = ["max_tokens", "model_length", "model_length"]
    assert found_by("inspect_ai", INSPECT, server) == {"openai-api/local": expected, "anthropic": expected}
