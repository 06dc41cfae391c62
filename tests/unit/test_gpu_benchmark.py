"""The program that measures a GPU: limits of its parts, and what it keeps of one that does not end."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import pytest
from gpu_parts import history, page, skyrl_training
from gpu_parts.common import Options, measured_again, operations
from gpu_parts.kernels import Ran, summary

OPTIONS = Options(toy=True, rank=8, repeats=1)


class SkyrlTypes:
    """Takes the place of SkyRL's types: plain lists and dictionaries."""

    ModelInput = staticmethod(lambda chunks: chunks)
    EncodedTextChunk = staticmethod(lambda tokens: tokens)
    PreparedModelPassBatch = AdamParams = OptimStepInput = dict


class SkyrlStandIn:
    """Takes the place of SkyRL's backend. From the pass `fails_at` on, the memory is not enough."""

    def __init__(self, fails_at: int = 1000) -> None:
        self.config, self.model_config = SimpleNamespace(), SimpleNamespace()
        self.fails_at, self.passed, self.stepped = fails_at, list[dict[str, Any]](), list[str]()

    def _create_loss_and_grad_fn(self) -> None: ...

    def forward_backward(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.passed.append(batch)
        if len(self.passed) >= self.fails_at:
            msg = "RESOURCE_EXHAUSTED: out of memory\nand a long report"
            raise RuntimeError(msg)
        return {"0": SimpleNamespace(loss_fn_outputs=[{"elementwise_loss": {"data": [1.0]}}])}

    def optim_step(self, model_id: str, _params: object) -> None:
        self.stepped.append(model_id)


def a_part(directory: Path, body: str) -> None:
    """Write a program that takes the place of gpu.py."""
    (directory / "part.py").write_text(body)


@pytest.fixture(autouse=True)
def _this_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "part.py"))


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    a_part(tmp_path, "import time; time.sleep(600)")
    assert gpu.apart("training", 0.1, [])["error"] == "took longer than 0 s"


def test_figures_of_a_part_without_a_report_are_kept(tmp_path: Path) -> None:
    a_part(tmp_path, """print('figures {"a": {"s": 1}}'); raise SystemExit(1)""")
    report = gpu.apart("training", 60, [])
    assert (report["a"], report["error"]) == ({"s": 1}, "the process ended without a report")


def test_the_parts_that_have_goals_come_first_and_fit_into_eight_minutes() -> None:
    have_goals = ["limits", "training", "jax_sampling", "jax_training", "skyrl_training"]
    order = list(gpu.PARTS)
    assert order[:2] == have_goals[:2]
    assert set(order[:5]) == set(have_goals)
    assert sum(gpu.PARTS[part] for part in have_goals) <= gpu.IN_ALL_S < 480
    assert set(order[-3:]) == {"sampling", "plain_vllm", "served"}  # need vLLM


def test_every_part_is_a_module_that_the_help_tells_of() -> None:
    for part in gpu.PARTS:
        assert f"\n    {part} " in (gpu.__doc__ or ""), part
        assert importlib.util.find_spec(f"gpu_parts.{part}"), part


def test_without_skyrl_its_part_says_so_by_name() -> None:
    if importlib.util.find_spec("skyrl"):
        pytest.skip("SkyRL is installed")
    assert gpu.one("skyrl_training", OPTIONS) == {"not_measured": "skyrl is not installed"}


def test_skyrl_gets_the_same_tokens_one_tenant_at_a_time() -> None:
    ops = operations(["a", "b"], 512, OPTIONS.tokens, seed=0, tile=64)
    backend = SkyrlStandIn()
    peer = skyrl_training.Peer(backend, SkyrlTypes, vocab_size=512, least_s_per_token=1e-6)
    figures = peer.measured(skyrl_training.Settings(recompute=True, sequences=2), ops, repeats=1)
    assert figures["tokens"] == sum(len(datum.tokens_T) for op in ops for datum in op.data)
    assert (backend.config.train_micro_batch_size, backend.model_config.gradient_checkpointing) == (2, True)
    assert backend.stepped == ["a", "b"] * 2  # the first time it compiles
    assert [batch["request_batch_slices"] for batch in backend.passed[:2]] == [
        [("0", op.model_id, 0, len(op.data))] for op in ops
    ]
    for batch, op in zip(backend.passed, ops * 2, strict=True):
        assert batch["all_model_inputs"] == [[datum.tokens_T.tolist()] for datum in op.data]
        assert batch["all_targets"] == [datum.loss_inputs["target_tokens"].tolist() for datum in op.data]
        assert batch["all_model_ids"] == [op.model_id] * len(op.data)


def test_settings_of_skyrl_that_do_not_fit_are_told() -> None:
    ops = operations(["a"], 512, OPTIONS.tokens, seed=0)
    peer = skyrl_training.Peer(SkyrlStandIn(fails_at=2), SkyrlTypes, vocab_size=512, least_s_per_token=1e-6)
    figures = peer.measured(skyrl_training.SETTINGS[0], ops, repeats=1)
    assert figures == {"failed": "RESOURCE_EXHAUSTED: out of memory"}
    with pytest.raises(RuntimeError, match="with 8 tenants: RESOURCE_EXHAUSTED"):
        skyrl_training.check({"tenants: 8, recomputed": {"tenants": 8, **figures}})


@pytest.mark.parametrize(("after", "limit", "share"), [(800e12, 800.0, 0.5), (500e12, 625.0, 0.64)])
def test_shares_are_of_the_larger_of_two_limits(after: float, limit: float, share: float) -> None:
    figures = {"s": 1.5, "share_of_matmul_limit": 0.64}
    report = {**figures, "layers": 12, "limits": {"bandwidth_gb_per_s": 4155.0}, "tenants: 1": figures, "packings": {}}
    found = measured_again(report, 625e12, after)
    expected = {"s": 1.5, "share_of_matmul_limit": pytest.approx(share)}
    limits = {"bandwidth_gb_per_s": 4155.0, "matmul_tflops": limit, "matmul_tflops_at_first": 625.0}
    assert found == {**expected, "layers": 12, "limits": limits, "tenants: 1": expected, "packings": {}}


def test_kernels_are_summed_by_kind_and_what_lies_between_is_idle() -> None:
    ran = [
        Ran("nvjet_sm90_tst_192x192", 0, 100),
        Ran("_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalINS5_17GroupProblemShape", 50, 150),
        Ran("void pytorch_flash::flash_fwd_kernel<...>", 200, 260),
        Ran("triton_poi_fused__grouped_mm_add_mul_silu_6", 260, 270),
        Ran("Memcpy HtoD (Pinned -> Device)", 300, 310),
    ]
    found = summary(ran)
    assert found["span_s"] == pytest.approx(310e-6)
    assert found["by_kind_s"] == pytest.approx(
        {"matmul": 1e-4, "grouped products": 1e-4, "attention": 6e-5, "rest": 1e-5, "copies": 1e-5, "idle": 8e-5}
    )
    assert found["kernels"] == 5


def test_a_published_run_is_on_the_page_with_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "RUNS", tmp_path / "gpu.json")
    machine = {"when": "today", "commit": "abc", "card": "a card", "memory": "80 GiB", "driver": "1", "versions": {}}
    step = {"tokens": 16384, "forward_backward_s": 1.5, "tokens_per_s": 10_900.0, "share_of_matmul_limit": 0.451}
    report = {
        "run": machine,
        "limits": {"matmul_tflops": 785.2, "bandwidth_gb_per_s": 4155.3},
        "training": {"tenants: 1": step, "kernels, tenants: 1": {"by_kind_s": {"matmul": 0.99, "idle": 0.01}}},
        "experts": {"error": "took longer than 90 s"},
    }
    for number, more in enumerate(({"drawing": {"rows": 256}}, {})):
        run = {**machine, "when": f"day {number}"}
        (tmp_path / "report.json").write_text(json.dumps({**report, **more, "run": run}))
        history.publish([tmp_path / "report.json"])
    shown = page.render(json.loads((tmp_path / "gpu.json").read_text()))
    assert shown.index("### day 1, a card") < shown.index("### day 0, a card")
    assert shown.count("| `training`, tenants: 1 | 1.5 | 10,900 | 45.1% |  |  |") == 1, "the newest of each part"
    assert "| `drawing` | rows 256 |" in shown
    assert "| `training`, kernels, tenants: 1 | 990 | 10 |" in shown
    assert "785 TFLOP/s in a product of matrices" in shown
    assert "- **experts**: failed: took longer than 90 s." in shown


def test_the_page_compares_with_skyrls_fastest_settings_or_says_that_nobody_did() -> None:
    machine = {"when": "today", "commit": "abc", "card": "a card", "memory": "80 GiB", "driver": "1", "versions": {}}
    ours = {
        "forward_backward, tenants: 8": {"tokens": 16068, "s": 1.5, "share_of_matmul_limit": 0.5},
        "optim_step, tenants: 8": {"s": 0.01, "tokens_per_s": 10_000.0},
        "forward_backward, tenants: 1": {"tokens": 16068, "s": 1.5, "share_of_matmul_limit": 0.5},
        "optim_step, tenants: 1": {"s": 0.01, "tokens_per_s": 10_000.0},
    }
    step = {"tenants": 8, "tokens": 16068, "forward_backward_s": 4.0, "share_of_matmul_limit": 0.2}
    theirs = {
        "tenants: 8, recomputed": {**step, "tokens_per_s": 4000.0},
        "tenants: 8, activations kept": {**step, "tokens_per_s": 5000.0},
        "tenants: 8, more kept": {"tenants": 8, "failed": "no memory"},
        "tenants: 1, recomputed": {**step, "tenants": 1, "tokens": 15988, "tokens_per_s": 4000.0},  # other tokens
    }
    run = {**machine, "notes": [], "parts": {"jax_training": ours, "skyrl_training": theirs}}
    shown = page.render([run])
    assert "| tenants: 8 | 10,000 | 5,000 | 2.00 |" in shown
    assert "| tenants: 1 | 10,000" not in shown
    assert "not measured beside ours" not in shown
    del run["parts"]["skyrl_training"]
    assert page.render([run]).startswith("SkyRL's JAX backend was not measured beside ours on a GPU yet.")
