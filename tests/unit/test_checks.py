"""What the backend cannot do is refused with the thing, the value and what is allowed; what it can is let through."""

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import ReplayedExperts, SamplerCapabilities, TrainerCapabilities
from tinsmith.checks import check_operation
from tinsmith.errors import ServerError, UnsupportedError, UserError
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.ranges import sampling_ranges, training_ranges
from tinsmith.store import EngineCapabilities

LOSSES = {spec.name: spec for spec in BUILTIN_LOSSES}
TRAINER = TrainerCapabilities(
    vocab_size=10,
    max_context_tokens=8,
    max_batch_tokens=64,
    losses=frozenset({"cross_entropy", "ppo"}),
    max_lora_rank=4,
    lora_targets=frozenset({"attn", "mlp"}),
    max_targets_per_token=2,
)
SAMPLER = SamplerCapabilities(
    vocab_size=10,
    max_context_tokens=8,
    max_lora_rank=4,
    lora_targets=frozenset({"attn", "mlp"}),
    prompt_logprobs=True,
    target_prompt_logprobs=True,
    max_topk_logprobs=3,
)
RANGES = {**training_ranges(TRAINER), **sampling_ranges(SAMPLER)}


WITH_GSPO = replace(TRAINER, losses=frozenset({"gspo"}))


def check(
    op: ops.Operation, trainer: TrainerCapabilities = TRAINER, sampler: SamplerCapabilities | None = SAMPLER
) -> None:
    check_operation(op, EngineCapabilities.of(trainer, sampler), LOSSES)


def lora(**fields: object) -> ops.CreateModel:
    config = {"rank": 2, "seed": 0, "train_unembed": False, **fields}
    return ops.CreateModel(model_id="m", lora=ops.LoraConfig(**config))


def test_a_good_adapter_passes() -> None:
    check(lora())


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (lora(rank=-1), "lora_config: rank is -1; allowed: 1 to 4"),
        (lora(rank=0), "rank 0 asks for full fine-tuning, which this base model's backend does not offer"),
        (lora(rank=5), "rank is 5; allowed: 1 to 4"),
        (lora(rank=2**31), "rank is 2147483648"),
        (lora(seed=-1), "seed is -1; allowed: 0 to 9223372036854775807"),
        (lora(seed=2**63), "seed is 9223372036854775808"),
        (lora(alpha=1e300), r"alpha is 1e\+300; allowed: 1e-06 to 1000000"),
        (lora(alpha=0.0), "alpha is 0.0"),
        (lora(train_attn=False, train_mlp=False), "all false"),
        (lora(train_unembed=True), "train_unembed is not offered"),
    ],
)
def test_adapters_the_backend_cannot_train(op: ops.CreateModel, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(op)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (
            lora(rank=0, train_unembed=True),
            r"rank 0 trains all weights.* alone; use a rank of 1 to 3, or .*`models\[\]",
        ),
        (
            lora(rank=4),
            "rank is 4, and this base model's sampler .* up to 3; use such a rank, or .*`max_lora_rank` raised",
        ),
        (lora(train_unembed=True), r"train_unembed is set, .*sampler.* set it to false, or .*`models\[\].sampler`"),
    ],
)
def test_models_that_can_be_trained_but_not_sampled(op: ops.CreateModel, words: str) -> None:
    """They are refused before they are trained, and not at their first save."""
    trainer = replace(TRAINER, lora_targets=TRAINER.lora_targets | {"unembed"}, full_fine_tuning=True)
    sampler = replace(SAMPLER, max_lora_rank=3)
    check(op, trainer, None)
    check(op, trainer, replace(sampler, max_lora_rank=4, lora_targets=trainer.lora_targets, full_fine_tuning=True))
    with pytest.raises(UnsupportedError, match=words):
        check(op, trainer, sampler)


def test_a_backend_without_lora_says_so() -> None:
    with pytest.raises(UnsupportedError, match="trains no LoRA"):
        check(lora(), replace(TRAINER, max_lora_rank=0))


def passes(
    tokens: list[int] = [1, 2, 3],  # noqa: B006 - never changed
    loss_fn: str = "cross_entropy",
    config: Mapping[str, float] | None = None,
    **inputs: object,
) -> ops.ForwardBackward:
    arrays = {"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, np.float32), **inputs}
    datum = ops.Datum(
        tokens_T=np.array(tokens, np.int32),
        loss_inputs={name: value for name, value in arrays.items() if value is not None},
    )
    return ops.ForwardBackward(model_id="m", data=(datum,), loss_fn=loss_fn, loss_fn_config=config or {})


def test_a_good_pass_is_let_through_in_one_or_two_dimensions() -> None:
    check(passes())
    check(passes(target_tokens=np.zeros((3, 2), np.int64), weights=np.zeros((3, 2), np.float32)))
    check(passes(weights=np.array([-1.0, 0.0, 2.5], np.float32)))


def of_gspo(shape: tuple[int, ...] = (3,), **config: float) -> ops.ForwardBackward:
    inputs = dict.fromkeys(("logprobs", "advantages", "sequence_ratio_mask"), np.ones(shape, np.float32))
    return passes(loss_fn="gspo", config=config, weights=None, target_tokens=np.zeros(shape, np.int64), **inputs)


def test_a_loss_of_whole_sequences_needs_its_settings_and_one_target() -> None:
    thresholds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    check(of_gspo(**thresholds), WITH_GSPO)
    check(of_gspo((3, 1), **thresholds), WITH_GSPO)
    with pytest.raises(UserError, match=r"'clip_high_threshold' is missing; 'gspo' needs clip_low_thr.*, clip_high"):
        check(of_gspo(clip_low_threshold=0.9), WITH_GSPO)
    with pytest.raises(UserError, match=r"target_tokens has shape \[3, 2\]; 'gspo' takes one target per token"):
        check(of_gspo((3, 2), **thresholds), WITH_GSPO)


def corrected(shape: tuple[int, ...] = (3,), loss_fn: str = "ppo", **config: float) -> ops.ForwardBackward:
    names = ("logprobs", "advantages", "rollout_logprobs", "sequence_ratio_mask")
    inputs = dict.fromkeys(names, np.ones(shape, np.float32))
    return passes(loss_fn=loss_fn, config=config, weights=None, target_tokens=np.zeros(shape, np.int64), **inputs)


def without(op: ops.ForwardBackward, name: str) -> ops.ForwardBackward:
    """A second datum lacks an input."""
    inputs = {key: value for key, value in op.data[0].loss_inputs.items() if key != name}
    return replace(op, data=(*op.data, replace(op.data[0], loss_inputs=inputs)))


CAPS = {"token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0}


def test_any_correction_of_a_loss_that_can_be_scaled_is_let_through() -> None:
    check(corrected())
    check(corrected((3, 1), geo_mask_low=0.9, geo_mask_high=1.1, token_tis_ratio_clip_high=2.0))
    check(corrected(outlier_token_is_threshold_high=100.0))


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (corrected((3, 2)), "'ppo' with 'rollout_logprobs' takes one target per token"),
        (without(corrected(), "rollout_logprobs"), r"data\[1\]: .*'rollout_logprobs' is missing"),
        (without(corrected(), "sequence_ratio_mask"), r"data\[1\]: .*'sequence_ratio_mask' is missing"),
        (corrected(**CAPS), "'token_tis_ratio_clip_high' and 'sequence_tis_ratio_clip_high' exclude each other"),
        (corrected(geo_mask_low=0.9), "'geo_mask_low' comes without its other bound"),
        (corrected(product_mask_low=2.0, product_mask_high=0.5), "product_mask_low 2.0 is above product_mask_high 0.5"),
        (corrected(token_tis_ratio_clip_high=0.0), "'token_tis_ratio_clip_high' is 0.0; ratios"),
        (corrected(outlier_token_is_threshold_low=-0.5), "'outlier_token_is_threshold_low' is -0.5; ratios"),
        (corrected(geo_mask_hihg=1.0), "'geo_mask_hihg' is not a setting of 'ppo'; allowed: .*geo_mask_high"),
        (passes(config={"geo_mask_low": 0.9}), "'geo_mask_low' needs 'rollout_logprobs' in .* every datum"),
        (corrected(loss_fn="cross_entropy"), "'rollout_logprobs' does not go with 'cross_entropy'"),
    ],
)
def test_corrections_that_fit_nothing_are_refused(op: ops.ForwardBackward, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(op)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (passes(loss_fn="gspo"), "loss_fn 'gspo' is not offered.*cross_entropy, ppo"),
        (passes(loss_fn="dro"), "loss_fn 'dro' is not offered"),
        (passes(config={"beta": 1.0}), "'beta' is not a setting of 'cross_entropy'"),
        (passes(tokens=[]), r"data\[0\]: model_input is empty"),
        (passes(tokens=[1] * 9), "9 tokens; the context holds 8"),
        (passes(tokens=[1, 10, 3]), "token id 10 at position 1 is not in 0 to 9"),
        (passes(tokens=[1, 2, -5]), "token id -5 at position 2"),
        (passes(target_tokens=np.array([1, 2, 99])), "target_tokens: token id 99 at position 2"),
        (passes(target_tokens=np.array([1, 2])), r"shape \[2\], model_input 3 tokens"),
        (passes(target_tokens=np.array([1, 2, 3, 4])), r"shape \[4\]"),
        (passes(target_tokens=np.zeros((3, 3), np.int64)), "3 targets per token; allowed: 1 to 2"),
        (passes(target_tokens=np.zeros(3, np.float32)), "float32; send int64"),
        (passes(target_tokens=None), "'target_tokens' is missing"),
        (passes(weights=None), "'weights' is missing"),
        (passes(mask=np.ones(3, np.float32)), "'mask' is not an input of 'cross_entropy'"),
        (passes(weights=np.ones(2, np.float32)), "weights has shape"),
        (passes(weights=np.array([1, np.nan, 1], np.float32)), "weights holds nan at position 1"),
        (passes(weights=np.array([1, 1, np.inf], np.float32)), "weights holds inf at position 2"),
        (passes(loss_fn="ppo"), "'advantages' is missing"),
        (
            passes(loss_fn="ppo", config={"clip_low_threshold": 2.0}),
            "clip_low_threshold 2.0 is above clip_high_threshold 1.2",
        ),
        (passes(loss_fn="ppo", config={"clip_low_threshold": float("nan")}), "'clip_low_threshold' is nan; allowed"),
        (passes(loss_fn="ppo", config={"clip_high_threshold": 1e39}), r"is 1e\+39; allowed: -3.4e\+38 to 3.4e\+38"),
        (ops.ForwardBackward(model_id="m", data=()), "data is empty"),
    ],
)
def test_passes_the_backend_cannot_run(op: ops.ForwardBackward, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(op)


REPLAYED = ReplayedExperts(num_layers=2, num_experts=4, top_k=2)


def passes_with_experts(experts: object) -> ops.ForwardBackward:
    op = passes()
    return replace(op, data=(replace(op.data[0], routed_experts=np.array(experts, np.uint16)),))


def test_experts_of_a_sample_are_let_through_where_they_are_replayed() -> None:
    experts = [[[0, 3], [1, 2]], [[2, 1], [3, 0]]]  # of two of three tokens
    for op in (passes(), passes_with_experts(experts), passes_with_experts(np.zeros((0, 0, 0)))):
        check(op, replace(TRAINER, replayed_experts=REPLAYED))
    with pytest.raises(UnsupportedError, match=r"data\[0\]: .* this base model's backend does not replay"):
        check(passes_with_experts(experts))


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        ([[[0, 1], [2, 3]]] * 4, r"have the shape \[4, 2, 2\]; 3 tokens of this model need \[<= 3, 2, 2\]: they were"),
        ([[[0, 1]]], r"have the shape \[1, 1, 2\]"),
        ([[[0, 1, 2], [0, 1, 2]]], r"have the shape \[1, 2, 3\]"),
        ([[[0, 1], [2, 4]]], "go up to number 4; this model has 4, from 0 on: they were sampled with another model"),
        ([[[0, 1], [2, 3]], [[0, 1], [3, 3]]], r"of token 1 in layer 1 are \[3, 3\]; they must differ"),
    ],
)
def test_experts_that_the_models_router_cannot_have_chosen(experts: object, words: str) -> None:
    with pytest.raises(ServerError, match=rf"data\[0\]: its recorded experts {words}"):
        check(passes_with_experts(experts), replace(TRAINER, replayed_experts=REPLAYED))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, -5e-324, 1e39, 1.7e308])
@pytest.mark.parametrize("name", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"])
def test_steps_that_would_break_a_model(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"^adam_params: {name} is {re.escape(str(value))}; allowed: (0|1.2e-38) "):
        check(ops.OptimStep(model_id="m", adam=ops.AdamParams(**{name: value})))


@pytest.mark.parametrize(
    "fields",
    [
        {"learning_rate": 3e38},  # divided by 1 - beta1, it is beyond float32
        {"weight_decay": 1e37},  # times the learning rate, too
        {"beta1": 1 - 1e-16},  # 1 in float32
        {"beta2": 1.0},
        {"eps": 0.0},  # a weight without a gradient would be 0 / 0
        {"grad_clip_norm": 1e-50},  # 0 in float32, which would be "off"
    ],
)
def test_steps_whose_numbers_do_not_fit_float32(fields: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(fields))):
        check(ops.OptimStep(model_id="m", adam=ops.AdamParams(**fields)))


def test_whatever_is_derived_from_allowed_hyperparameters_fits_float32() -> None:
    largest = {name: RANGES[f"adam_params: {name}"].high for name in ("learning_rate", "beta1", "weight_decay")}
    rate, beta, decay = largest.values()
    greatest, least = np.finfo(np.float32).max, np.finfo(np.float32).tiny
    assert np.float32(beta) < 1
    for derived in (
        rate / (1 - beta),
        rate * decay,
        *(RANGES[f"adam_params: {n}"].high for n in ("eps", "grad_clip_norm")),
    ):
        assert derived < greatest
    assert RANGES["adam_params: grad_clip_norm"].low > least


def test_ordinary_steps_pass() -> None:
    check(ops.OptimStep(model_id="m", adam=ops.AdamParams()))
    check(ops.OptimStep(model_id="m", adam=ops.AdamParams(learning_rate=0.0, eps=1.2e-38, grad_clip_norm=1.0)))
    check(ops.OptimStep(model_id="m", adam=ops.AdamParams(learning_rate=1e-40, beta1=0.0, grad_clip_norm=1e30)))


def sample(prompt: list[int] = [1, 2, 3], **fields: object) -> ops.Sample:  # noqa: B006 - never changed
    params = {"max_tokens": 2, "seed": 0, **{k: fields.pop(k) for k in list(fields) if k in PARAMS}}
    return ops.Sample(
        sampling_session_id="s",
        snapshot_id=None,
        prompt_P=np.array(prompt, np.int32),
        params=ops.SamplingParams(**params),
        **fields,
    )


PARAMS = {"max_tokens", "seed", "temperature", "top_k", "top_p", "stop_strings", "stop_tokens"}


def test_a_good_sample_passes() -> None:
    check(sample(temperature=0.0, top_k=1, top_p=0.5, stop_tokens=(3,), prompt_logprobs=True, prompt_logprobs_last_n=2))
    check(sample(target_prompt_logprobs=np.array([[1, -1], [-1, 9]])))


def test_a_prompt_may_fill_the_context_as_a_trained_sequence_may() -> None:
    check(passes([1] * 8, target_tokens=np.ones(8, np.int64), weights=np.ones(8, np.float32)))
    check(sample([1] * 8, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=7))


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (sample([]), "prompt is empty"),
        (sample(max_tokens=6), r"Prompt length plus max_tokens exceeds the model's context window: 3 \+ 6 > 8"),
        (sample([1] * 8, max_tokens=2), r"context window: 8 \+ 2 > 8"),
        (sample([1] * 9, max_tokens=1), r"context window: 9 \+ 1 > 8"),
        (sample([1, 77]), "prompt: token id 77 at position 1"),
        (sample(max_tokens=0), "max_tokens is 0"),
        (sample(temperature=-0.1), "temperature is -0.1"),
        (sample(temperature=float("nan")), r"temperature is nan; allowed: 0 \(greedy\), or 1e-06 to 1000000"),
        (sample(temperature=1e-45), "temperature is 1e-45"),
        (sample(temperature=1e30), r"temperature is 1e\+30"),
        (sample(top_k=0), r"top_k is 0; allowed: -1 \(off\), or 1 to 2147483647"),
        (sample(top_k=2**31), "top_k is 2147483648"),
        (sample(top_k=-2), "top_k is -2"),
        (sample(top_p=0.0), "top_p is 0.0"),
        (sample(top_p=1e-300), "top_p is 1e-300"),
        (sample(top_p=1.1), "top_p is 1.1"),
        (sample(seed=-1), "seed is -1"),
        (sample(seed=2**63), "seed is 9223372036854775808"),
        (sample(num_samples=0), "num_samples is 0; allowed: 1 to 1024"),
        (sample(num_samples=1025), "num_samples is 1025"),
        (sample(stop_strings=("x",)), "stop strings are not offered"),
        (sample(stop_tokens=(10,)), "sampling_params: stop: token id 10"),
        (sample(topk_prompt_logprobs=4), "topk_prompt_logprobs is 4; allowed: 0 to 2"),
        (sample(topk_sample_logprobs=-1), "topk_sample_logprobs is -1"),
        (sample(prompt_logprobs_last_n=1), "needs prompt_logprobs"),
        (sample(prompt_logprobs=True, prompt_logprobs_last_n=3), "last_n is 3; with a prompt of 3 tokens use 1 to 2"),
        (sample(target_prompt_logprobs=np.zeros((3, 1), np.int64)), r"has shape \[3, 1\]; expected \[2, K\]"),
        (sample(target_prompt_logprobs=np.array([[1], [-2]])), "token id -2"),
    ],
)
def test_samples_the_backend_cannot_draw(op: ops.Sample, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(op)


def test_a_sampler_says_which_temperatures_it_takes() -> None:
    narrow = replace(SAMPLER, min_temperature=0.01, max_temperature=2.0)
    for allowed in (0.0, 0.01, 2.0):
        check(sample(temperature=allowed), sampler=narrow)
    for refused in (0.005, 2.0000001, 1e5):
        with pytest.raises(UserError, match=rf"temperature is {refused}; allowed: 0 \(greedy\), or 0.01 to 2$"):
            check(sample(temperature=refused), sampler=narrow)


def test_a_large_top_k_is_allowed() -> None:
    for top_k in (10, 11, 2**31 - 1):
        check(sample(top_k=top_k))


@pytest.mark.parametrize(
    "op",
    [
        ops.SaveState(model_id="m", path="p", ttl_seconds=3599),
        ops.SaveForSampler(model_id="m", path="p", ttl_seconds=-1),
        ops.ExportAdapter(model_id="m", path="p", ttl_seconds=2**62),
    ],
)
def test_checkpoints_that_would_expire_too_soon_or_never(op: ops.Operation) -> None:
    with pytest.raises(UserError, match=rf"ttl_seconds is {op.ttl_seconds}; allowed: 3600 to 315360000"):
        check(op)


@pytest.mark.parametrize("name", ["topk_sample_logprobs", "topk_prompt_logprobs"])
def test_what_sampling_returns_can_be_trained_on(name: str) -> None:
    """A distillation samples K alternatives per token and sends them back as K targets."""
    for k in range(5):
        targets = np.ones((3, max(k, 1)), np.int64)
        sampled = passed(sample(**{name: k}))
        trained = passed(passes(target_tokens=targets, weights=np.ones(targets.shape, np.float32)))
        assert sampled == trained == (k <= 2), k
    with pytest.raises(UserError, match=f"{name} is 3; allowed: 0 to 2, the targets per token .* trains on"):
        check(sample(**{name: 3}))
    check(sample(**{name: 3}), replace(TRAINER, max_lora_rank=0))  # nothing is trained here


def passed(op: ops.Operation) -> bool:
    try:
        check(op)
    except UserError:
        return False
    return True


def test_a_sampler_that_cannot_score_prompts_says_so() -> None:
    poor = SamplerCapabilities(vocab_size=10, max_context_tokens=8)
    for op in (sample(prompt_logprobs=True), sample(target_prompt_logprobs=np.array([[1], [1]]))):
        with pytest.raises(UnsupportedError, match="not offered"):
            check(op, sampler=poor)
    with pytest.raises(UnsupportedError, match="no sampler"):
        check(sample(), sampler=None)


def test_a_sequence_fits_into_trainer_and_sampler() -> None:
    """What is sampled is trained on, and the other way round: the shorter context is that of both."""
    long = 9
    with pytest.raises(UserError, match=r"context window: 3 \+ 6 > 8"):
        check(sample(max_tokens=6), sampler=replace(SAMPLER, max_context_tokens=long))
    ones = np.ones(long, np.float32)
    with pytest.raises(UserError, match="model_input has 9 tokens; the context holds 8"):
        check(
            passes([1] * long, target_tokens=ones.astype(np.int64), weights=ones),
            replace(TRAINER, max_context_tokens=long),
        )
