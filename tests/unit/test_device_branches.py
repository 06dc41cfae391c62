"""Every decision on a device has a test that forces its side for GPUs, on machines that have none.

What chooses between CPU and GPU was never executed on the GPU's side, so neither a wrong choice nor the call behind it
was seen. The places are found in the sources. A new one needs a test, and a line here that names it.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import syntax_trees

ROOT = Path(__file__).parents[2]
ROOMS = (
    *sorted(ROOT.glob("libraries/*/tinsmith_*/")),
    *sorted(ROOT.glob("plugins/*/tinsmith_*/")),
)
_OF_PLATFORMS: Final = frozenset({"type", "platform"})

FSDP = "plugins/fsdp_backend/tests/test_fsdp_devices.py::"
MEGATRON = "plugins/megatron_backend/tests/test_megatron_devices.py::"
JAX = "plugins/jax_backend/tests/test_jax_devices.py::"
VLLM = "plugins/vllm_sampler/tests/test_vllm_processes.py::"
NO_CPU = "test_the_cpu_never_takes_the_place_of_a_gpu"
ADMISSION = "test_what_does_not_fit_on_a_card_is_known_before_it_starts"
SHARE = "test_a_rank_on_a_gpu_takes_its_share_and_is_deterministic_if_that_is_claimed"
CLAIMS = "test_on_gpus_no_bits_are_claimed"
ROWS = "test_the_head_takes_more_rows_at_a_time_on_a_gpu"
THERE_AND_BACK = "test_what_goes_to_a_gpu_and_back_does_not_stop_it"
ASLEEP = "test_a_sleeper_on_a_gpu_waits_for_its_copies"
OPEN = "test_settings_that_are_left_open"
PRODUCTS = "test_a_gpu_leaves_products_to_cublas_unless_the_operator_says_otherwise"
TRAINER = "test_a_trainer_claims_no_bits"
NO_SHIM = "test_where_there_is_a_gpu_nothing_is_taken_from_the_shim"
UNCHANGED = "test_on_gpus_nothing_is_changed_that_only_cpus_need"

FORCED_BY: Mapping[str, str] = {
    "tinsmith_workers.torch.adamw:adamw_": (
        "plugins/fsdp_backend/tests/test_fsdp_modes.py::test_a_gpu_steps_all_models_in_one_kernel"
    ),
    "tinsmith_workers.torch.delta_rule:gated_delta": (
        "libraries/workers/tests/test_gated_delta.py::test_packed_sequences_agree_with_transformers_on_each_alone"
    ),
    "tinsmith_workers.torch.head:_chunks": FSDP + ROWS,
    "tinsmith_workers.torch.models:free_what_is_unused": FSDP + THERE_AND_BACK,
    "tinsmith_workers.torch.process_group:_computes_on_gpus": FSDP + NO_CPU,
    "tinsmith_workers.torch.process_group:join_process_group": FSDP + "test_ranks_on_gpus_meet_by_nccl",
    "tinsmith_workers.torch.process_group:worker_device": FSDP + "test_a_rank_takes_the_gpu_of_its_place",
    "tinsmith_workers.torch.rank:TorchRank.load": FSDP + SHARE,
    "tinsmith_workers.torch.sleeping:SleepingTensors._copy": FSDP + ASLEEP,
    "tinsmith_workers.torch.sleeping:SleepingTensors._synchronize": FSDP + ASLEEP,
    "tinsmith_workers.torch.transfers:HostCopies.__init__": FSDP + THERE_AND_BACK,
    "tinsmith_workers.torch.transfers:to_device": FSDP + THERE_AND_BACK,
    "tinsmith_workers.torch.transfers:wait_for": (
        "plugins/fsdp_backend/tests/test_fsdp_modes.py::test_a_gpu_is_waited_for_before_scores_are_read"
    ),
    "tinsmith_fsdp.attention:packed_attention": (
        "plugins/fsdp_backend/tests/test_fsdp_attention.py::test_attention_on_a_gpu_is_that_of_each_sequence"
    ),
    "tinsmith_fsdp.backend:FsdpBackend.prepare": FSDP + CLAIMS,
    "tinsmith_jax.backend:JaxBackend._as_trainer": JAX + TRAINER,
    "tinsmith_jax.backend:_half_busy": JAX + TRAINER,
    "tinsmith_jax.compilation:_options": JAX + PRODUCTS,
    "tinsmith_jax.diagnosis:_name_of": JAX + "test_doctor_names_the_gpu_whether_or_not_there_is_a_compiler",
    "tinsmith_jax.head:chunk_rows": JAX + OPEN,
    "tinsmith_jax.kernels.choice:choose": (
        "plugins/jax_backend/tests/test_kernels.py::test_platforms_choose_their_kernels"
    ),
    "tinsmith_jax.mesh:arranged": ("tools/workbench/tests/test_compile_check.py::test_chips_of_an_axis_are_neighbours"),
    "tinsmith_jax.placing:trainer_demand": (
        "plugins/jax_backend/tests/test_jax_loading.py::test_no_gpu_is_taken_if_jax_is_to_compute_on_the_cpu"
    ),
    "tinsmith_jax.runtime:Limits.exact": JAX + OPEN,
    "tinsmith_jax.runtime:_computing": JAX + OPEN,
    "tinsmith_jax.runtime:_suits_native": JAX + OPEN,
    "tinsmith_jax.runtime:computing_platform": (
        "plugins/jax_backend/tests/test_jax_loading.py::test_the_cpu_never_takes_the_place_of_an_accelerator"
    ),
    "tinsmith_jax.runtime:decide": JAX + OPEN,
    "tinsmith_jax.runtime:divided": JAX + TRAINER,
    "tinsmith_jax.sampling_device:sampling_shape": JAX + OPEN,
    "tinsmith_jax.train_step:TrainPrograms._on_cpu": JAX + TRAINER,
    "tinsmith_jax.train_step:TrainPrograms.finds_not_finite": JAX + TRAINER,
    "tinsmith_megatron.attention:PackedAttention.forward": (
        MEGATRON + "test_attention_on_a_gpu_is_that_of_each_sequence"
    ),
    "tinsmith_megatron.backend:MegatronBackend.prepare": MEGATRON + CLAIMS,
    "tinsmith_megatron.cpu_shim:install": MEGATRON + NO_SHIM,
    "tinsmith_megatron.megatron_here:": MEGATRON + NO_SHIM,
    "tinsmith_vllm.compat:check_heads": VLLM + UNCHANGED,
    "tinsmith_vllm.compat:compute_gated_delta": VLLM + UNCHANGED,
    "tinsmith_vllm.compat:forget_packed_experts": VLLM + UNCHANGED,
    "tinsmith_vllm.compat:import_without_torchvision": VLLM + UNCHANGED,
    "tinsmith_vllm.compat:leave_base_rows_alone": VLLM + UNCHANGED,
    "tinsmith_vllm.compat:check_platform": (
        "plugins/vllm_sampler/tests/test_vllm_gpu_starts.py"
        "::test_a_card_that_cannot_be_used_ends_the_start_in_the_words_of_torch"
    ),
    "tinsmith_vllm.heads:Heads.__init__": ("plugins/vllm_sampler/tests/test_vllm_heads.py::test_each_row_gets_its_own"),
    "tinsmith_vllm.draws:draw": (
        "plugins/vllm_sampler/tests/test_vllm_fused_draws.py::test_rows_on_a_gpu_go_to_the_kernels"
    ),
    "tinsmith_workers.config:TrainingWorkersConfig.computes_on_cpu": (
        "plugins/fsdp_backend/tests/test_fsdp_admission.py::" + ADMISSION
    ),
    "tinsmith_workers.config:TrainingWorkersConfig.num_devices": (
        "plugins/fsdp_backend/tests/test_fsdp_admission.py::" + ADMISSION
    ),
    "tinsmith_workers.training_backend:agreed_device": (
        FSDP + "test_a_worker_that_computes_elsewhere_than_asked_is_refused"
    ),
    "tinsmith_workers.training_backend:WorkersBackend.describe": MEGATRON + CLAIMS,
}
"""By module and function: a test that takes the side of GPUs with a stand-in for one."""

WITHOUT_A_CHOICE = {
    "tinsmith_openai.messages.bodies:CountTokensRequest._template_options": "the type of thinking, not of a device",
    "tinsmith_megatron.cpu_shim:_is_cuda": "reads what a call names, where there is no GPU",
}


def test_every_decision_on_a_device_is_forced() -> None:
    found = {place for room in ROOMS for file in room.rglob("*.py") for place in places(file, room)}
    assert found - FORCED_BY.keys() - WITHOUT_A_CHOICE.keys() == set(), "force them in a test, and name it above"
    assert (FORCED_BY.keys() | WITHOUT_A_CHOICE.keys()) - found == set(), "they decide nothing any more"
    assert sorted({test for test in FORCED_BY.values() if not syntax_trees.has_test(ROOT, test)}) == []


def places(file: Path, room: Path) -> Iterator[str]:
    """Yield the functions of a file that decide on a device, as "module:function"."""
    module = ".".join(file.relative_to(room.parent).with_suffix("").parts)
    for name, node in syntax_trees.named(syntax_trees.tree_of(file)):
        if decides(node):
            yield f"{module}:{name}"


def decides(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="is_cuda" | "default_backend"):
            return True
        case ast.Call(func=ast.Attribute(attr="is_cpu")):
            return True
        case ast.Call(func=ast.Attribute(attr="is_available", value=ast.Attribute(attr="cuda"))):
            return True
        case ast.Name(id="elsewhere" | "_ELSEWHERE" | "cpu_shim", ctx=ast.Load()):
            return True
        case ast.Compare():
            return any(map(is_of_a_device, (node.left, *node.comparators)))
    return False


def is_of_a_device(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="sys")):  # the operating system
            return False
        case ast.Attribute(attr=name) | ast.Name(id="platform" as name):
            return name in _OF_PLATFORMS
    return False


def test_a_decision_is_found_wherever_it_stands(tmp_path: Path) -> None:
    source = """
    if torch.cuda.is_available(): ...
    class A:
        def b(self):
            def c(): return x.is_cuda
            return device.type == "cpu"
        def d(self): return sys.platform == "linux" or self.is_available()
    async def e(): return jax.default_backend()
    def f(): return limits.platform != "cpu"
    def g(): return current_platform.is_cpu()
    """
    file = tmp_path / "room" / "m.py"
    file.parent.mkdir()
    file.write_text(source.replace("\n    ", "\n"))
    assert set(places(file, file.parent)) == {f"room.m:{name}" for name in ("", "A.b.c", "A.b", "e", "f", "g")}
