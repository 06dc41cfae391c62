"""`tinsmith checkpoint` against real PEFT and transformers: what it writes loads there, and what they write here."""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner, Result

from tinsmith.backend import ModelState
from tinsmith.checkpoints.saved import read_checkpoint, write_checkpoint
from tinsmith.commands.cli import build_group
from tinsmith.operations import Array, LoraConfig
from tinsmith.plugins.loading import Plugins
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import CheckpointRecord, StoreContext
from tinsmith.testing.int8_model import write_int8_model
from tinsmith.testing.saved_files import read_saved
from tinsmith_checkpoints.huggingface.model_files import read_model_config
from tinsmith_checkpoints.huggingface.safetensors_files import ShardWriter, StoredTensors
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

RANK = 4
LORA = LoraConfig(rank=RANK, seed=0)
TOKENS = torch.arange(3, 40)[None]
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MODULES += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch and its company, not ours
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]


TOOL_USE = "{{ tools | tojson }}"


def shape(*, tied: bool) -> TinyShape:
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "head_dim": 16}
    return TinyShape(**sizes, num_heads=4, num_kv_heads=2, tied=tied)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    root = tmp_path_factory.mktemp("bases")
    for tied in (True, False):
        write_tiny_model(root / str(tied), shape(tied=tied))
        (root / str(tied) / "additional_chat_templates").mkdir()
        (root / str(tied) / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    return {tied: root / str(tied) for tied in (True, False)}


def adapter(base: Path, *, head: bool = True, seed: int = 0) -> dict[str, Array]:
    shapes = StoredTensors.of(base, "model").shapes()
    rng = np.random.default_rng(seed)
    modules = {f"model.layers.{layer}.{module}" for layer in range(2) for module in MODULES}
    sizes = {module: shapes[f"{module}.weight"] for module in sorted(modules)}
    if head:
        sizes["lm_head"] = shapes["model.embed_tokens.weight"]
    weights: dict[str, Array] = {}
    for module, (out, into) in sizes.items():
        weights[f"base_model.model.{module}.lora_A.weight"] = (0.1 * rng.normal(size=(RANK, into))).astype(np.float32)
        weights[f"base_model.model.{module}.lora_B.weight"] = (0.1 * rng.normal(size=(out, RANK))).astype(np.float32)
    return weights


def state(base: Path, *, head: bool = True) -> ModelState:
    return ModelState(
        lora=replace(LORA, train_unembed=head),
        weights=adapter(base, head=head),
        adam_m=adapter(base, head=head, seed=1),
        adam_v={name: array**2 for name, array in adapter(base, head=head, seed=2).items()},
        gradients=adapter(base, head=head, seed=3),
        step=3,
    )


def saved(root: Path, what: ModelState, base: Path, kind: Any = "training", **more: Any) -> Path:
    write_checkpoint(
        root,
        "run/weights/x",
        kind=kind,
        state=what,
        base_model=str(base),
        user_metadata={"a": "b"},
        created_at=datetime(2026, 1, 31, tzinfo=UTC),
        overwrite=True,
        **more,
    )
    return root / "run/weights/x"


def run(*arguments: object) -> Result:
    plugins = Plugins.load()
    return CliRunner().invoke(build_group(plugins), ["checkpoint", *map(str, arguments)], obj=plugins)


def ok(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exception is not None
    assert not isinstance(result.exception, SystemExit), result.output
    return str(result.exception)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits  # type: ignore[no-any-return]


def with_peft(base: Path, directory: Path) -> Any:
    from peft import PeftModel  # here: it takes longer to import than all tests take to collect

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, directory)


# show and verify ------------------------------------------------------------------------------------------------------


def test_show_tells_what_it_is(tmp_path: Path, bases: dict[bool, Path]) -> None:
    directory = saved(tmp_path, state(bases[True]), bases[True])
    told = json.loads(ok("show", directory, "--json"))
    assert told["kind"] == "training checkpoint, adapter"
    assert (told["step"], told["lora"]["rank"], told["base_model"]) == (3, RANK, str(bases[True]))
    assert told["tensors"]["weights"]["base_model.model.lm_head.lora_A.weight"]["shape"] == [RANK, 32]
    assert len(told["tensors"]["optimizer"]) == 2 * len(told["tensors"]["weights"])
    assert all(file["sha256"] for name, file in told["files"].items() if name != "tinsmith.json")
    text = ok("show", directory)
    assert "down_proj" in text
    assert "4 x 32" in text


def test_show_knows_a_model_and_takes_tinker_paths(tmp_path: Path, bases: dict[bool, Path]) -> None:
    assert json.loads(ok("show", bases[False], "--json"))["kind"] == "Hugging Face full model"
    saved(tmp_path / "checkpoints", state(bases[True]), bases[True])
    assert "training checkpoint" in ok("show", "tinker://run/weights/x", "--data-dir", tmp_path)
    assert "no checkpoint 'run/weights/y'" in refused("show", "tinker://run/weights/y", "--data-dir", tmp_path)
    assert "holds no checkpoint" in refused("show", tmp_path)


def test_show_prints_the_directory_of_a_run_as_it_is(tmp_path: Path, bases: dict[bool, Path]) -> None:
    directory = saved(tmp_path / "0:train:0", state(bases[True]), bases[True])
    assert f"directory  {directory}" in ok("show", directory)


def test_verify_finds_nothing_wrong(tmp_path: Path, bases: dict[bool, Path]) -> None:
    for tied in (True, False):
        assert "no faults" in ok("verify", saved(tmp_path, state(bases[tied]), bases[tied]))
    assert "no faults" in ok("verify", bases[True])


def test_verify_lists_every_fault(tmp_path: Path, bases: dict[bool, Path]) -> None:
    good = state(bases[True])
    name = "base_model.model.lm_head.lora_A.weight"
    bad = replace(
        good,
        weights={**good.weights, name: good.weights[name] * np.float32(np.nan)},
        adam_v={each: -array for each, array in good.adam_v.items()},
    )
    directory = saved(tmp_path, bad, bases[True])
    (directory / "adapter_config.json").write_text("{}")
    (directory / "stray").write_text("")
    result = run("verify", directory, "--json")
    assert result.exit_code == 1
    faults = "\n".join(json.loads(result.stdout)["faults"])
    for expected in (
        "adapter_config.json: has 2 bytes",
        "stray: is not listed",
        f"weights: {name} holds 128 values that are not finite",
        f"optimizer: adam_v.{name} holds 128 negative values",
    ):
        assert expected in faults


def test_verify_compares_with_the_base_model(tmp_path: Path, bases: dict[bool, Path]) -> None:
    write_tiny_model(tmp_path / "other", replace(shape(tied=True), hidden_size=64, num_layers=1))
    directory = saved(tmp_path, state(bases[True]), bases[True])
    result = run("verify", directory, "--base-model", tmp_path / "other")
    assert result.exit_code == 1
    assert "the base model has no model.layers.1.mlp.up_proj.weight" in result.stdout
    assert "model.layers.0.self_attn.q_proj of the base model needs [4, 64]" in result.stdout


# export, merge, convert -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_merged_models_compute_what_peft_computes(
    tmp_path: Path, bases: dict[bool, Path], tied: bool, head: bool
) -> None:
    directory = saved(tmp_path, state(bases[tied], head=head), bases[tied])
    ok("export-peft", directory, tmp_path / "peft")
    ok("merge", directory, tmp_path / "merged", "--shard-mb", 1)
    adapted = with_peft(bases[tied], tmp_path / "peft")
    expected = logits(adapted)  # unmerged: merging in PEFT would change a tied embedding, too
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float32
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)
    assert (logits(merged) - logits(adapted.unload())).abs().max() > 0.01
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.encode("hello")
    assert tokenizer.get_chat_template(tools=[]) == TOOL_USE, "templates in files of their own"
    if not tied or not head:
        theirs = with_peft(bases[tied], tmp_path / "peft").merge_and_unload().state_dict()
        for name, tensor in merged.state_dict().items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-6)
    else:
        untouched = StoredTensors.of(bases[True], "model")["model.embed_tokens.weight"]
        np.testing.assert_array_equal(merged.get_input_embeddings().weight.numpy(force=True), untouched)


def test_merging_rounds_once_to_the_dtype_asked_for(tmp_path: Path, bases: dict[bool, Path]) -> None:
    directory = saved(tmp_path, state(bases[False]), bases[False])
    told = ok("merge", directory, tmp_path / "full")
    full, originals = StoredTensors.of(tmp_path / "full", "model"), StoredTensors.of(bases[False], "model")
    changed = [name for name, array in full.items() if not np.array_equal(array, originals[name])]
    assert 0 < len(changed) < len(full)
    assert f"{len(changed)} weights changed" in told
    ok("merge", directory, tmp_path / "half", "--dtype", "bfloat16")
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16
    for name, exact in full.items():
        assert torch.equal(half.get_parameter(name), torch.tensor(exact).bfloat16())


def test_an_adapter_merges_into_a_model_of_8_bit_integers(tmp_path: Path, bases: dict[bool, Path]) -> None:
    """What comes out is unquantised, and loads as such."""
    write_int8_model(bases[False], tmp_path / "int8", tmp_path / "plain")
    merged = {}
    for name in ("int8", "plain"):
        base = tmp_path / name
        directory = saved(tmp_path / f"of-{name}", state(base), base)
        ok("merge", directory, tmp_path / f"merged-{name}")
        merged[name] = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"merged-{name}").state_dict()
    for name, tensor in merged["plain"].items():
        torch.testing.assert_close(merged["int8"][name], tensor, rtol=0, atol=0)
    assert "quantization_config" not in read_model_config(tmp_path / "merged-int8")


def test_adapters_in_peft_are_the_same_bits(tmp_path: Path, bases: dict[bool, Path]) -> None:
    what = state(bases[False])
    ok("export-peft", saved(tmp_path, what, bases[False]), tmp_path / "peft")
    model = with_peft(bases[False], tmp_path / "peft")
    loaded = {name.replace(".default", ""): each for name, each in model.named_parameters() if ".lora_" in name}
    assert loaded.keys() == what.weights.keys()
    for name, array in what.weights.items():
        np.testing.assert_array_equal(loaded[name].numpy(force=True), array)


def test_the_head_gets_the_name_that_tinkers_service_gives_it(tmp_path: Path, bases: dict[bool, Path]) -> None:
    """Under it, tinker-cookbook merges the head of a tied model; see tests/e2e/test_cookbook.py."""
    what = state(bases[True])
    ok("export-peft", saved(tmp_path, what, bases[True]), tmp_path / "tinker", "--head", "unembed_tokens")
    stored = StoredTensors.of(tmp_path / "tinker", "adapter_model")
    renamed = {name for name in stored if "unembed_tokens" in name}
    assert renamed == {f"base_model.model.model.unembed_tokens.lora_{side}.weight" for side in "AB"}
    assert not any("lm_head" in name for name in stored)
    assert "no faults" in ok("verify", tmp_path / "tinker", "--base-model", bases[True])
    ok("export-peft", tmp_path / "tinker", tmp_path / "peft")  # and back
    back = StoredTensors.of(tmp_path / "peft", "adapter_model")
    assert back.keys() == what.weights.keys()
    for name, array in what.weights.items():
        np.testing.assert_array_equal(back[name], array)
    with pytest.warns(UserWarning, match="missing adapter keys"):  # PEFT does not drop the head in silence
        with_peft(bases[True], tmp_path / "tinker")


def test_converting_changes_dtype_and_shards(tmp_path: Path, bases: dict[bool, Path]) -> None:
    ok("convert", bases[False], tmp_path / "half", "--dtype", "bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert model.dtype == torch.bfloat16
    ok("convert", tmp_path / "half", tmp_path / "back", "--dtype", "float32")
    for name, array in StoredTensors.of(tmp_path / "back", "model").items():
        np.testing.assert_array_equal(array, model.get_parameter(name).float().numpy(force=True))
    directory = saved(tmp_path, state(bases[False]), bases[False])
    ok("convert", directory, tmp_path / "again" / "x")
    again, before = read_checkpoint(tmp_path / "again", "x"), read_checkpoint(directory.parent, "x")
    assert (again.created_at, again.user_metadata, again.state.step) == (before.created_at, before.user_metadata, 3)
    for name, array in before.state.adam_v.items():
        np.testing.assert_array_equal(again.state.adam_v[name], array)
    assert "is float32; export it first" in refused("convert", directory, tmp_path / "z", "--dtype", "bfloat16")


def test_a_full_checkpoint_is_converted_in_shards(tmp_path: Path, bases: dict[bool, Path]) -> None:
    weights = dict(StoredTensors.of(bases[True], "model").items())
    full = ModelState(lora=LoraConfig(rank=0, seed=0), weights=weights, gradients=weights)
    directory = saved(tmp_path, full, bases[True], model_path=bases[True], shard_bytes=1 << 16)
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    assert "no faults" in ok("verify", directory)
    ok("convert", directory, tmp_path / "one" / "x")
    assert len(list((tmp_path / "one" / "x").glob("model-*.safetensors"))) == 1
    assert "no faults" in ok("verify", tmp_path / "one" / "x")
    assert "has no adapter" in refused("export-peft", directory, tmp_path / "y")


def test_what_is_there_is_replaced_only_by_force(tmp_path: Path, bases: dict[bool, Path]) -> None:
    directory = saved(tmp_path, state(bases[True]), bases[True])
    ok("export-peft", directory, tmp_path / "out")
    (tmp_path / "out" / "mine").write_text("")
    assert "already exists" in refused("export-peft", directory, tmp_path / "out")
    assert (tmp_path / "out" / "mine").exists()
    ok("export-peft", directory, tmp_path / "out", "--force")
    assert not (tmp_path / "out" / "mine").exists()


def test_interrupted_work_leaves_nothing(
    tmp_path: Path, bases: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved(tmp_path, state(bases[True]), bases[True])
    (tmp_path / "outputs").mkdir()
    writer, calls = ShardWriter.add, list[str]()

    def add(self: ShardWriter, name: str, array: Array) -> None:
        calls.append(name)
        if len(calls) == 5:
            raise KeyboardInterrupt
        writer(self, name, array)

    monkeypatch.setattr(ShardWriter, "add", add)
    assert run("merge", directory, tmp_path / "outputs" / "merged").exit_code != 0
    assert list((tmp_path / "outputs").iterdir()) == []


# import ---------------------------------------------------------------------------------------------------------------


def made_by_peft(base: Path, directory: Path, **config: Any) -> Path:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    values = {"r": RANK, "lora_alpha": 10, "init_lora_weights": False, "task_type": "CAUSAL_LM", **config}
    values.setdefault("target_modules", [module.rpartition(".")[2] for module in MODULES])
    get_peft_model(model, PeftConfig(**values)).save_pretrained(directory)
    return directory


def imported(data_dir: Path) -> list[CheckpointRecord]:
    async def read() -> list[CheckpointRecord]:
        store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=data_dir))
        await store.open()
        records, _ = await store.list_checkpoints("ann")
        await store.close()
        return records

    return asyncio.run(read())


def test_a_peft_adapter_becomes_a_tenants_checkpoint(tmp_path: Path, bases: dict[bool, Path]) -> None:
    source = made_by_peft(bases[True], tmp_path / "source")
    arguments = ("import", source, "--base-model", bases[True], "--data-dir", tmp_path / "data", "--tenant", "ann")
    paths = ok(*arguments, "--name", "mine").split()
    assert paths == ["tinker://imported:ann:mine/weights/mine", "tinker://imported:ann:mine/sampler_weights/mine"]
    records = imported(tmp_path / "data")
    assert {record.path for record in records} == set(paths)
    assert {(r.lora.rank, r.lora.alpha, r.lora.train_attn, r.lora.train_unembed) for r in records} == {
        (RANK, 10.0, True, False)
    }
    found = read_saved(tmp_path / "data", paths[0])
    assert found.base_model == str(bases[True])
    ok("export-peft", paths[0], tmp_path / "back", "--data-dir", tmp_path / "data")
    there, back = (logits(with_peft(bases[True], directory)) for directory in (source, tmp_path / "back"))
    assert torch.equal(there, back)
    assert "already exists" in refused(*arguments, "--name", "mine")
    ok(*arguments, "--name", "mine", "--force")


def test_a_whole_model_becomes_a_checkpoint_of_full_fine_tuning(tmp_path: Path, bases: dict[bool, Path]) -> None:
    write_tiny_model(tmp_path / "tuned", replace(shape(tied=True), seed=9))
    common = ("--data-dir", tmp_path / "data", "--tenant", "ann", "--name", "full")
    ok("import", tmp_path / "tuned", "--base-model", bases[True], *common)
    assert {record.lora.rank for record in imported(tmp_path / "data")} == {0}
    assert "no faults" in ok("verify", "tinker://imported:ann:full/weights/full", "--data-dir", tmp_path / "data")
    write_tiny_model(tmp_path / "other", replace(shape(tied=True), num_layers=1))
    problem = refused("import", tmp_path / "other", "--base-model", bases[True], *common, "--force")
    assert "not of the base model's shape" in problem


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern is"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save is ['embed_tokens']"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"target_modules": ["q_proj", "v_proj"]}, "leaves out 4 modules"),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding_A"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, bases: dict[bool, Path], config: dict[str, Any], expected: str
) -> None:
    source = made_by_peft(bases[True], tmp_path / "source", **config)
    common = ("--base-model", bases[True], "--data-dir", tmp_path / "data", "--tenant", "ann", "--name", "x")
    assert expected in refused("import", source, *common)
    assert not (tmp_path / "data" / "checkpoints").exists()


def test_missing_modules_can_start_at_zero_effect(tmp_path: Path, bases: dict[bool, Path]) -> None:
    source = made_by_peft(bases[True], tmp_path / "source", target_modules=["q_proj", "v_proj"])
    common = ("--base-model", bases[True], "--data-dir", tmp_path / "data", "--tenant", "ann", "--name", "x")
    path = ok("import", source, *common, "--fill-missing").split()[0]
    ok("export-peft", path, tmp_path / "back", "--data-dir", tmp_path / "data")
    torch.testing.assert_close(
        logits(with_peft(bases[True], tmp_path / "back")), logits(with_peft(bases[True], source)), rtol=0, atol=1e-6
    )


def test_an_import_names_a_directory_as_the_server_does(
    tmp_path: Path, bases: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bases[True].parent)
    source = made_by_peft(bases[True], tmp_path / "source")
    where = ("--data-dir", tmp_path / "data")
    printed = ok("import", source, "--base-model", bases[True].name, *where, "--name", "x", "--tenant", "ann")
    told = json.loads(ok("show", printed.split()[0], "--json", *where))
    assert told["base_model"] == str(bases[True])


def test_an_import_says_whose_it_is(tmp_path: Path, bases: dict[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    source = made_by_peft(bases[True], tmp_path / "source")
    common = ("import", source, "--base-model", bases[True], "--data-dir", tmp_path / "data", "--name", "x")
    assert "pass the tenant that may use it" in refused(*common)
    assert "imported:key-" in ok(*common, "--api-key", "tml-somebody")
