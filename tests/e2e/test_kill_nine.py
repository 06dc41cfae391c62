"""The unmodified SDK trains while processes are killed with SIGKILL: it sees delay, and the undisturbed run's bits."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
from killed_runs import WAIT_S, Killer, check, serving, undisturbed
from processes import Launcher

from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import TOY, running_server
from tinsmith.testing.sdk_data import TOKENS, wait_until_at_rest
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

pytestmark = pytest.mark.slow

KILLS = 10


@pytest.mark.thorough  # crash/test_campaign.py does so in `make test`
def test_the_engine_is_killed_at_random_moments(launcher: Launcher, tmp_path: Path) -> None:
    random_ = random.Random(20)
    moments = [(2 * number, random_.uniform(0.0, 0.1)) for number in range(KILLS - 3)]
    moments += [(step, random_.uniform(0.3, 2.0)) for step in (4, 8, 12)]  # while the next engine starts or recovers
    with serving(launcher, tmp_path / "killed") as served:
        expected = undisturbed(tmp_path / "undisturbed", served.model)
        check(served, Killer(served.kill_engine, sorted(moments)), *expected)


@pytest.mark.thorough  # as above
def test_everything_is_killed_and_started_again(launcher: Launcher, tmp_path: Path) -> None:
    with serving(launcher, tmp_path / "killed") as served:

        def kill_and_start() -> bool:
            served.kill_everything()
            served.start()
            return True

        random_ = random.Random(21)
        moments = [(step, random_.uniform(0.0, 0.1)) for step in (5, 13)]
        expected = undisturbed(tmp_path / "undisturbed", served.model)
        check(served, Killer(kill_and_start, moments), *expected)


def test_everything_is_killed_while_a_client_waits_for_many_samples(launcher: Launcher, tmp_path: Path) -> None:
    """The client polls for all its samples with one cursor, which the kill does not take from it."""
    prompt = tinker.ModelInput.from_ints(TOKENS)

    def samples(sampler: tinker.SamplingClient, seeds: range) -> list[Any]:
        params = [tinker.SamplingParams(max_tokens=8, seed=seed) for seed in seeds]
        return [sampler.sample(prompt, num_samples=1, sampling_params=each) for each in params]

    def tokens(futures: list[Any]) -> list[list[int]]:
        return [future.result(timeout=WAIT_S).sequences[0].tokens for future in futures]

    with serving(launcher, tmp_path / "killed", poll_samples_together="always") as served:
        service = tinker.ServiceClient(base_url=served.url, api_key="tml-test")
        sampler = service.create_sampling_client(base_model="toy").result(timeout=WAIT_S)
        futures = samples(sampler, range(15))
        futures[0].result(timeout=WAIT_S)
        served.kill_everything()
        futures += samples(sampler, range(15, 30))
        served.start()
        seen = tokens(futures)
        with sqlite3.connect(served.data_dir / "tinsmith.db") as database:
            finished = database.execute("SELECT number, request_id FROM finished_samples ORDER BY number").fetchall()
            states = database.execute("SELECT state, count(*) FROM operations GROUP BY state").fetchall()
        database.close()
        wait_until_at_rest(sampler)
        service.close("success").result(timeout=WAIT_S)
    assert states == [("succeeded", 30)]  # nothing was sent again under another number
    assert [number for number, _ in finished] == list(range(1, 31))
    assert len({request_id for _, request_id in finished}) == 30
    with running_server(tmp_path / "undisturbed", models=[TOY]) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        assert tokens(samples(service.create_sampling_client(base_model="toy").result(), range(30))) == seen
        service.close("success").result(timeout=WAIT_S)


def write_qwen3(directory: Path) -> None:
    shape = TinyShape(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
    )
    write_tiny_model(directory, shape)


def write_deepseek_v3(directory: Path) -> None:
    """Attention by latents; a dense layer before one with experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM  # here: the other tests need neither

    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    latents = {"q_lora_rank": 12, "kv_lora_rank": 10, "v_head_dim": 6}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "bos_token_id": None, "eos_token_id": 2}
    config = DeepseekV3Config(**sizes, **heads, **latents, **experts, **layers)
    DeepseekV3ForCausalLM(config).save_pretrained(directory)


@pytest.mark.thorough
@pytest.mark.parametrize("write", [write_qwen3, write_deepseek_v3])
def test_an_engine_of_the_jax_backend_is_killed(
    launcher: Launcher, tmp_path: Path, write: Callable[[Path], None]
) -> None:
    """The engine finds the programs that the undisturbed run compiled, as an engine does that is started again."""
    write(tmp_path / "tiny")
    options = {"plugin": "jax", "max_lora_rank": 8, "max_context_tokens": 128, "max_batch_tokens": 128}
    model = ModelSettings(
        name="tiny", path=tmp_path / "tiny", backend=PluginSection.model_validate({**options, "warm_up": False})
    )
    from jax._src import compilation_cache  # nothing public says which directory is in use

    expected = undisturbed(tmp_path / "undisturbed", model)
    compiled_here = compilation_cache._cache._path  # noqa: SLF001 - nothing public says where jax keeps programs
    shutil.copytree(compiled_here, tmp_path / "killed" / "cache" / "jax" / "tiny" / "compiled")
    random_ = random.Random(22)
    with serving(launcher, tmp_path / "killed", model) as served:
        moments = [(step, random_.uniform(0.0, 0.3)) for step in (3, 9, 15)]
        check(served, Killer(served.kill_engine, moments), *expected)
