"""The modules of tinker-cookbook 0.6.1 that run as programs, with arguments that make each a run of a step or two."""

from dataclasses import dataclass
from typing import Final

BASE_9B, CHAT_9B, CHAT_4B = "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-4B"
QWEN3_8B, QWEN3_4B = "Qwen/Qwen3-8B", "Qwen/Qwen3-4B-Instruct-2507"
LARGE_35B, LARGE_397B, LARGE_27B = "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.5-397B-A17B", "Qwen/Qwen3.6-27B"
QWEN38_27B = "Qwen/Qwen3.8-27B"
LARGE_35B_262K = f"{LARGE_35B}:peft:262144"

_TRAINS = ("forward_backward", "optim_step")
_SAMPLES = ("sample",)
_RL = (*_TRAINS, *_SAMPLES)


@dataclass(frozen=True, kw_only=True)
class Lack:
    """What an entry point needs and does not have here."""

    what: str
    shown_by: str  # a regular expression: what it wrote says so


@dataclass(frozen=True, kw_only=True)
class Entry:
    module: str  # below tinker_cookbook
    models: tuple[str, ...] = ()  # base models that it asks for
    data: tuple[str, ...] = ()  # data sets that it loads from the hub
    stand_ins: tuple[str, ...] = ()  # in place of what else it needs
    size: tuple[str, ...] = ()  # arguments that only make it smaller
    argument: tuple[str, ...] = ()  # arguments without which it does not run here
    why: str = ""  # the arguments
    after: str = ""  # the module whose last checkpoint it reads: {sampler}, {state} or, downloaded, {adapter}
    types: str = ""  # what its user types
    up: str = ""  # what it writes once it serves; it does not end by itself
    does: tuple[str, ...] = ()  # kinds of operations that it must have submitted
    lacks: Lack | None = None
    note: str = ""


_INKLING = Lack(
    what="Inkling, whose layers no backend has yet", shown_by=r"no base model named 'thinkingmachines/Inkling'"
)
_EXAMPLE = Lack(
    what="Inkling, whose layers no backend has yet, and before that the example that it loads from the hub",
    shown_by=r"DatasetNotFoundError|coroutine raised StopIteration",
)
_IMAGES = Lack(what="images, which this server does not take yet", shown_by=r"'image' chunks are not offered")
_AFTER_IMAGES = Lack(
    what="a checkpoint of the sweep, which needs images", shown_by=r"No checkpoint with sampler_path found"
)
_SEARCH = Lack(
    what="a Chroma index of Wikipedia, Gemini's API for its embeddings, and a data set of questions",
    shown_by=r"ConnectError|RepositoryNotFoundError",
)
_TERMINAL = Lack(what="the tasks of Terminal-Bench, and a sandbox", shown_by=r"No such file .*terminal-bench")
_PICTURES = ("dpdl-benchmark/caltech101",)
_NO_ROBOTS, _GSM8K, _DEEPMATH = ("HuggingFaceH4/no_robots",), ("openai/gsm8k",), ("zwhe99/DeepMath-103K",)
_TULU, _HHH = ("allenai/tulu-3-sft-mixture",), ("Anthropic/hh-rlhf",)
_RL_SIZE = ("max_steps=1", "group_size=2", "groups_per_batch=2", "max_tokens=8", "eval_every=0", "save_every=0")

ENTRIES: Final = (
    # The first steps
    Entry(
        module="recipes.sl_basic",
        models=(BASE_9B,),
        data=_NO_ROBOTS,
        size=("max_steps=2",),
        does=_TRAINS,
    ),
    Entry(
        module="recipes.sl_loop", models=(BASE_9B,), data=_NO_ROBOTS, size=("batch_size=4", "max_steps=2"), does=_TRAINS
    ),
    Entry(
        module="recipes.rl_basic",
        models=(BASE_9B,),
        data=_GSM8K,
        size=("max_tokens=8", "max_steps=1"),
        does=_RL,
    ),
    Entry(
        module="recipes.rl_loop",
        models=(BASE_9B,),
        data=_GSM8K,
        size=("batch_size=2", "group_size=8", "max_tokens=8", "max_steps=1"),
        does=_RL,
    ),
    # Supervised
    Entry(
        module="recipes.chat_sl.train",
        models=(BASE_9B,),
        data=_NO_ROBOTS,
        size=("batch_size=4", "max_steps=2"),
        does=_TRAINS,
    ),
    Entry(
        module="recipes.chat_sl.sweep.__main__",
        models=(BASE_9B,),
        data=_NO_ROBOTS,
        size=(
            "recipe=sft",
            "training_budget_examples=8",
            "base.batch_size=4",
            "learning_rates=[1e-4]",
            "lora_ranks=[8]",
        ),
        does=_TRAINS,
    ),
    Entry(
        module="recipes.chat_sl.sweep.cli",
        models=(BASE_9B,),
        data=_NO_ROBOTS,
        size=(
            "recipe=sft",
            "training_budget_examples=8",
            "base.batch_size=4",
            "learning_rates=[1e-4]",
            "lora_ranks=[8]",
        ),
        does=_TRAINS,
    ),
    Entry(
        module="recipes.chat_sl.sweep.launch_all",
        size=("--dry-run",),
        note="it only prints the commands that it would run",
    ),
    Entry(
        module="supervised.train",
        models=(QWEN3_8B,),
        size=(
            "log_path={dir}/runs/supervised",
            f"model_name={QWEN3_8B}",
            "recipe_name=cookbook",
            "max_steps=2",
            "dataset_builder=tinker_cookbook.supervised.data:FromConversationFileBuilder",
            "dataset_builder.file_path={dir}/conversations.jsonl",
            f"dataset_builder.common_config.model_name_for_tokenizer={QWEN3_8B}",
            "dataset_builder.common_config.renderer_name=qwen3",
            "dataset_builder.common_config.max_length=256",
            "dataset_builder.common_config.batch_size=4",
        ),
        does=_TRAINS,
        lacks=Lack(
            what="an annotation of its own function, without which chz cannot read the command line",
            shown_by=r"Nested entrypoints must take a type annotated argument",
        ),
    ),
    Entry(
        module="recipes.prompt_distillation.create_data",
        models=(LARGE_35B,),
        does=_SAMPLES,
    ),
    Entry(
        module="recipes.prompt_distillation.train",
        models=(LARGE_35B,),
        argument=("file_path={dir}/conversations.jsonl",),
        why="the tiny model's answers to `create_data` are noise, which it drops: the file is empty",
        size=("batch_size=4", "max_steps=1"),
        does=_TRAINS,
    ),
    Entry(
        module="recipes.distillation.off_policy_reasoning",
        models=(BASE_9B,),
        data=("open-thoughts/OpenThoughts3-1.2M",),
        size=("batch_size=4", "max_steps=2", "buffer_size=16", "max_prompts=16"),
        does=_TRAINS,
    ),
    # Preferences
    Entry(
        module="recipes.preference.dpo.train",
        models=(BASE_9B,),
        data=_HHH,
        size=("batch_size=4", "max_steps=2"),
        does=("forward", *_TRAINS),
    ),
    Entry(
        module="recipes.preference.shorter.train",
        models=(CHAT_4B,),
        size=("batch_size=2", "group_size=2", "max_tokens=8", "max_steps=1", "eval_every=0"),
        does=_RL,
    ),
    Entry(
        module="recipes.preference.rlhf.rlhf_pipeline",
        models=(BASE_9B,),
        data=(*_NO_ROBOTS, *_HHH),
        size=("batch_size=4", "max_steps=1", "rl_max_tokens=8", "rl_group_size=2", "eval_every=0"),
        does=_RL,
    ),
    # Reinforcement learning
    Entry(module="recipes.math_rl.train", models=(CHAT_9B,), size=_RL_SIZE, does=_RL),
    Entry(
        module="recipes.rl_numerics_check.train",
        models=(LARGE_35B_262K,),
        data=("Salesforce/wikitext",),
        size=(*_RL_SIZE[:4], "max_trajectory_tokens=2000"),
        does=_RL,
    ),
    Entry(
        module="recipes.multiplayer_rl.guess_number.train",
        models=(CHAT_4B,),
        size=("batch_size=2", "group_size=2", "max_tokens=8", "max_steps=1", "eval_every=0"),
        does=_RL,
    ),
    Entry(
        module="recipes.multiplayer_rl.text_arena.train",
        models=(CHAT_4B,),
        size=(
            "batch_size=2",
            "num_train_datapoints=8",
            "num_test_datapoints=2",
            "max_tokens=8",
            "max_steps=1",
            "eval_every=0",
        ),
        does=_RL,
    ),
    Entry(
        module="recipes.multiplayer_rl.text_arena.play",
        models=(CHAT_4B,),
        size=("mode=eval", "num_games=1", "checkpoint_path={sampler}"),
        after="recipes.multiplayer_rl.text_arena.train",
        does=_SAMPLES,
    ),
    Entry(
        module="recipes.multiplayer_rl.twenty_questions.train",
        models=(CHAT_4B,),
        size=("batch_size=2", "group_size=2", "max_tokens=8", "max_steps=1", "eval_every=0", "num_epochs=1"),
        does=_RL,
    ),
    Entry(module="recipes.rubric.generate_data"),
    Entry(
        module="recipes.rubric.train",
        models=(CHAT_9B, LARGE_35B),
        size=(
            "max_steps=1",
            "train_group_size=2",
            "groups_per_batch=2",
            "max_tokens=8",
            "eval_every=0",
            "save_every=0",
        ),
        does=_RL,
    ),
    Entry(module="recipes.rubric.debug_env", models=(CHAT_9B, CHAT_4B, LARGE_35B), types="Hello\n\n"),
    Entry(
        module="recipes.rubric.prometheus_experimental",
        models=(CHAT_9B, LARGE_35B),
        data=("prometheus-eval/Feedback-Collection",),
        size=(
            "max_steps=1",
            "train_group_size=2",
            "groups_per_batch=2",
            "max_tokens=8",
            "eval_every=0",
            "save_every=0",
        ),
        does=_RL,
    ),
    Entry(
        module="recipes.code_rl.train",
        models=(CHAT_9B,),
        data=("agentica-org/DeepCoder-Preview-Dataset",),
        size=_RL_SIZE,
        note="without its sandbox, each answer counts as wrong",
        does=_RL,
    ),
    Entry(
        module="recipes.forecasting.train",
        models=(QWEN38_27B,),
        stand_ins=("a table of markets",),
        argument=("data_path={dir}/markets.csv",),
        why="it downloads its table from the hub's own address",
        size=(
            "max_steps=1",
            "group_size=2",
            "groups_per_batch=2",
            "validation_group_size=1",
            "max_tokens=8",
            "eval_every=0",
        ),
        does=_RL,
    ),
    Entry(
        module="recipes.forecasting.data",
        stand_ins=("a table of markets",),
        argument=("--data-path={dir}/markets.csv",),
        why="it downloads its table from the hub's own address",
    ),
    Entry(
        module="recipes.decisions.demo",
        argument=(f"model_name={CHAT_4B}",),
        models=(CHAT_4B,),
        types="Who?\n",
        does=_SAMPLES,
    ),
    Entry(
        module="recipes.decisions.forecasting",
        models=(QWEN38_27B,),
        stand_ins=("a table of markets",),
        argument=("data_path={dir}/markets.csv",),
        why="it downloads its table from the hub's own address",
        size=("max_steps=1", "batch_size=2"),
        does=_TRAINS,
    ),
    Entry(
        module="recipes.verifiers_rl.train",
        models=(CHAT_4B,),
        size=(*_RL_SIZE,),
        does=_RL,
        lacks=Lack(
            what="an argument of its own function, which its trainer passes",
            shown_by=r"custom_do_group_rollout\(\) got an unexpected keyword argument 'termination'",
        ),
        stand_ins=("the environment reverse-text",),
    ),
    Entry(
        module="recipes.verifiers_rl.evaluate",
        models=(CHAT_4B,),
        size=(f"model_name={CHAT_4B}", "num_examples=1", "rollouts_per_example=1", "max_tokens=8"),
        does=_SAMPLES,
        lacks=Lack(
            what="a list of errors for its own printout: it samples, and fails when it shows a sample",
            shown_by="IndexError: list index out of range",
        ),
        stand_ins=("the environment reverse-text",),
    ),
    Entry(
        module="recipes.search_tool.train",
        models=(CHAT_4B,),
        size=("batch_size=2", "group_size=2", "max_tokens=8", "max_steps=1"),
        does=_RL,
        lacks=_SEARCH,
    ),
    Entry(
        module="recipes.search_tool.offline_eval",
        models=(CHAT_4B,),
        size=("max_eval_samples=1", "max_tokens=8", "tinker_checkpoint_url={sampler}"),
        after="recipes.multiplayer_rl.text_arena.train",
        does=_SAMPLES,
        lacks=_SEARCH,
    ),
    Entry(
        module="recipes.harbor_rl.scripts.train_terminal_bench",
        models=(CHAT_4B,),
        lacks=_TERMINAL,
    ),
    Entry(
        module="recipes.harbor_rl.scripts.eval_harbor_rl",
        models=(CHAT_4B,),
        lacks=_TERMINAL,
    ),
    # Distillation
    Entry(
        module="recipes.distillation.on_policy_distillation",
        models=(BASE_9B, CHAT_9B),
        data=_DEEPMATH,
        size=_RL_SIZE,
        does=_RL,
    ),
    Entry(
        module="recipes.distillation.on_policy_multi_teacher",
        models=(CHAT_9B, LARGE_27B, LARGE_397B),
        data=(*_DEEPMATH, *_TULU),
        size=(
            "max_steps=1",
            "group_size=2",
            "deepmath_groups_per_batch=2",
            "tulu3_groups_per_batch=2",
            "max_tokens=8",
            "eval_every=0",
            "save_every=0",
        ),
        does=_RL,
    ),
    Entry(
        module="recipes.distillation.on_policy_distillation_harbor_multi_turn",
        lacks=_TERMINAL,
    ),
    Entry(
        module="recipes.sdft.train",
        models=(QWEN3_8B,),
        data=("hicai-zju/SciKnowEval",),
        size=("max_steps=1", "groups_per_batch=2", "max_tokens=8", "eval_every=0", "save_every=0"),
        does=_RL,
    ),
    Entry(
        module="recipes.sdft.benchmark",
        stand_ins=("the data of the paper's repository",),
        models=(QWEN3_8B,),
        size=("max_steps=1", "groups_per_batch=2", "max_tokens=8", "sft_batch_size=2", "sft_max_steps=1"),
        does=_RL,
    ),
    Entry(
        module="recipes.sdft.run_continual_learning",
        stand_ins=("the data of the paper's repository",),
        models=(QWEN3_4B,),
        size=("batch_size=2", "max_tokens=8", "stages=1", "learning_rates=1e-4"),
        does=_RL,
    ),
    # Evaluation and sampling
    Entry(module="eval.custom_evaluators", models=(CHAT_9B,), does=_SAMPLES),
    Entry(
        module="eval.run_inspect_evals",
        models=(CHAT_9B,),
        size=(f"model_name={CHAT_9B}", "tasks=inspect_evals/gsm8k", "limit=1", "max_tokens=8"),
        data=_GSM8K,
        does=_SAMPLES,
    ),
    Entry(
        module="chat_app.tinker_chat_cli",
        models=(BASE_9B,),
        size=("max_tokens=8",),
        types="Hello\nquit\n",
        does=_SAMPLES,
    ),
    Entry(module="scripts.test_tool_calling_e2e", models=(CHAT_4B, QWEN3_4B), does=_SAMPLES),
    Entry(module="rl.play_w_env", models=(CHAT_4B, CHAT_9B), types="Is it a fruit?\n\n\n" * 30, does=_SAMPLES),
    Entry(
        module="recipes.true_thinking_score.analyze",
        models=(CHAT_4B,),
        data=("HuggingFaceH4/MATH-500",),
        size=("n_problems=2", "max_tokens=32"),
        does=_SAMPLES,
    ),
    Entry(module="recipes.true_thinking_score.run_small_experiment", models=(CHAT_4B,), does=_SAMPLES),
    Entry(
        module="capture.proxy.serve",
        models=(CHAT_4B,),
        size=("--base-model", CHAT_4B, "--port", "0", "--store-data-dir", "{dir}/capture"),
        up="capture proxy for .* on http:",
    ),
    # Images and sounds
    Entry(
        module="recipes.vlm_classifier.train",
        models=(LARGE_397B,),
        size=("experiment_dir={dir}/vlm",),
        stand_ins=_PICTURES,
        lacks=_IMAGES,
    ),
    Entry(
        module="recipes.vlm_classifier.sweep",
        models=(LARGE_397B,),
        size=("experiment_dir={dir}/vlm-sweep", "examples_per_class=[1]"),
        stand_ins=_PICTURES,
        lacks=_IMAGES,
    ),
    Entry(
        module="recipes.vlm_classifier.eval",
        models=(CHAT_4B,),
        after="recipes.multiplayer_rl.text_arena.train",
        size=(
            "dataset=caltech101",
            "model_path={sampler}",
            "renderer_name=qwen3_5_disable_thinking",
            f"model_name={CHAT_4B}",
        ),
        stand_ins=_PICTURES,
        lacks=_IMAGES,
    ),
    Entry(
        module="recipes.vlm_classifier.eval_sweep",
        after="recipes.vlm_classifier.sweep",
        models=(LARGE_397B,),
        size=("experiment_dir={dir}/vlm-sweep", "output_file={dir}/vlm.jsonl"),
        stand_ins=_PICTURES,
        lacks=_AFTER_IMAGES,
    ),
    *(
        Entry(module=module, lacks=_EXAMPLE if module.startswith("scripts.") else _INKLING)
        for module in (
            "recipes.audio.asr.rl_train",
            "recipes.audio.asr.sl_train",
            "recipes.audio.medical_asr.train",
            "recipes.audio.emotion.rl_train",
            "recipes.audio.emotion.sl_train",
            "recipes.audio.emotion.evaluate",
            "scripts.inkling.sample_audio",
            "scripts.inkling.sample_reasoning",
            "scripts.inkling.sample_vision",
        )
    ),
    # Checkpoints and accounts
    Entry(
        module="scripts.copy_checkpoint",
        models=(CHAT_4B,),
        after="recipes.multiplayer_rl.text_arena.train",
        size=("--source-path", "{state}"),
    ),
    Entry(module="scripts.save_audit_log", size=("--once", "--backfill-days", "1", "--output-dir", "{dir}/audit")),
    Entry(
        module="scripts.get_access_token",
        lacks=Lack(
            what="an organization at the vendor, whose address is in the script", shown_by="TINKER_CREDENTIAL_CMD"
        ),
    ),
    Entry(
        module="scripts.merge_tinker_adapter_to_hf_model",
        after="recipes.multiplayer_rl.text_arena.train",
        size=("--tinker-adapter-path", "{adapter}", "--hf-model", "{dir}/model", "--output-path", "{dir}/merged"),
        lacks=Lack(
            what="a model whose head is not tied to its embedding, as the tiny one's is",
            shown_by=r"mapped to 'lm_head.weight' which does not exist",
        ),
    ),
)
"""In the order in which they run: some read what an earlier one wrote."""

NO_SERVER: Final = (
    "capture.store.daemon",
    "recipes.audio.emotion.prepare_data",
    "recipes.chat_sl.sweep.analyze",
    "supervised.viz_sft_dataset",
    "utils.trace",
    "xmux.control",
    "xmux.examples.async_rl_sweep",
    "xmux.examples.fake_train",
    "xmux.examples.ml_sweep",
    "xmux.run_job",
)
"""Runnable as well, but they use no server of the Tinker API."""
