"""The program that measures a GPU: limits of its parts, and what it keeps of one that does not end."""

import json
from pathlib import Path

import gpu
import pytest
from gpu_parts import history, page
from gpu_parts.kernels import Ran, summary


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


def test_all_parts_fit_into_eight_minutes_without_vllm() -> None:
    needs_vllm = {"sampling", "plain_vllm", "served"}
    order = list(gpu.PARTS)
    assert order[:2] == ["limits", "training"]
    assert set(order[-3:]) == needs_vllm
    assert sum(limit for part, limit in gpu.PARTS.items() if part not in needs_vllm) < 540
    assert gpu.IN_ALL_S < 480


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
    for number in range(2):
        (tmp_path / "report.json").write_text(json.dumps({**report, "run": {**machine, "when": f"day {number}"}}))
        history.publish([tmp_path / "report.json"])
    shown = page.render(json.loads((tmp_path / "gpu.json").read_text()))
    assert shown.index("### day 1, a card") < shown.index("### day 0, a card")
    assert "| `training`, tenants: 1 | 1.5 | 10,900 | 45.1% |  |  |" in shown
    assert "| `training`, kernels, tenants: 1 | 990 | 10 |" in shown
    assert "785 TFLOP/s in a product of matrices" in shown
    assert "- **experts**: failed: took longer than 90 s." in shown
