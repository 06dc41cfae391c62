"""A training backend in NumPy: the next token from this one alone, with a LoRA adapter on the head.

Array suffixes: T = tokens of one sequence, V = vocabulary, H = hidden size, r = rank.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from pydantic import Field

import tinsmith
from tinsmith import AdamParams, Failed, ForwardBackwardOutput, ModelState, OptimStepOutput

A, B = (f"base_model.model.lm_head.lora_{which}.weight" for which in "AB")


class SkeletonConfig(tinsmith.BackendConfig):
    vocab_size: int = Field(64, ge=32, description="tokens are 0 to vocab_size - 1")
    hidden_size: int = Field(16, ge=1, description="width of the model, and its greatest rank")


class SkeletonBackend(tinsmith.TrainingBackend):
    def __init__(self, config: SkeletonConfig, context: tinsmith.BackendContext) -> None:
        rng, shape = np.random.default_rng(0), (config.vocab_size, config.hidden_size)
        self._embedding_VH, self._head_VH = rng.normal(size=shape), rng.normal(size=shape) / config.hidden_size**0.5
        self._losses = context.losses
        self._states: dict[str, ModelState] = {}  # by model; arrays are replaced, never written into

    @property
    def trainer_capabilities(self) -> tinsmith.TrainerCapabilities:
        vocab_size, hidden_size = self._head_VH.shape
        return tinsmith.TrainerCapabilities(
            device="cpu",
            dtype="float32",
            vocab_size=vocab_size,
            max_context_tokens=512,
            max_batch_tokens=16384,
            max_models=64,
            losses=frozenset(self._losses),
            max_lora_rank=hidden_size,
            lora_targets=frozenset({"unembed"}),
            deterministic=True,
            isolation="bitwise",
        )

    def create_model(self, op: tinsmith.CreateModel) -> None:
        (vocab_size, hidden_size), rank = self._head_VH.shape, op.lora.rank
        if not 1 <= rank <= hidden_size:
            msg = f"rank {rank} is not possible; it may be 1 to {hidden_size}"
            raise tinsmith.UserError(msg)
        down_rH = np.random.default_rng(op.lora.seed).normal(size=(rank, hidden_size)).astype(np.float32)
        self._states[op.model_id] = ModelState(
            lora=op.lora, weights={A: down_rH, B: np.zeros((vocab_size, rank), np.float32)}
        )

    def unload_model(self, model_id: str) -> None:
        del self._states[model_id]

    def forward(self, ops: Sequence[tinsmith.Forward]) -> list[ForwardBackwardOutput | Failed]:
        return [self._pass(op, backward=False) for op in ops]

    def forward_backward(self, ops: Sequence[tinsmith.ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        return [self._pass(op, backward=True) for op in ops]

    @np.errstate(all="ignore")  # NaN in, NaN out: its owner's business
    def _pass(self, op: tinsmith.ForwardBackward, *, backward: bool) -> ForwardBackwardOutput:
        spec, state, logprobs, total = self._losses[op.loss_fn], self._states[op.model_id], [], 0.0
        down_rH, up_Vr = (state.weights[name].astype(np.float64) for name in (A, B))
        for datum in op.data:
            shape = datum.loss_inputs["target_tokens"].shape  # [T] or [T, 1], as the client sent it
            inputs = {name: values.reshape(-1) for name, values in datum.loss_inputs.items()}
            targets_T = inputs["target_tokens"]
            x_TH = self._embedding_VH[datum.tokens_T]
            x_Tr = state.lora.scale * x_TH @ down_rH.T
            logits_TV = x_TH @ self._head_VH.T + x_Tr @ up_Vr.T
            logp_TV = logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True)
            logp_T = logp_TV[range(len(targets_T)), targets_T]
            loss_T, dlogp_T = spec.of_sequence(np, logp_T, inputs, {**spec.config, **op.loss_fn_config})
            logprobs.append({"logprobs": logp_T.reshape(shape).astype(np.float32)})
            total += float(loss_T.sum())
            if backward:  # d logp / d logits is onehot(target) - softmax; the rest is the chain rule
                dlogits_TV = (np.eye(len(up_Vr))[targets_T] - np.exp(logp_TV)) * dlogp_T[:, None]
                gradients = {A: state.lora.scale * (dlogits_TV @ up_Vr).T @ x_TH, B: dlogits_TV.T @ x_Tr}
                pending = {n: (state.gradients.get(n, 0.0) + g).astype(np.float32) for n, g in gradients.items()}
                state = replace(state, gradients=pending)
        metrics = {"loss:sum": total}
        if backward:
            self._states[op.model_id] = state
            metrics[tinsmith.NOT_FINITE] = float(not tinsmith.are_finite(state.gradients))
        return ForwardBackwardOutput(loss_fn_outputs=tuple(logprobs), metrics=metrics)

    def optim_step(self, ops: Sequence[tinsmith.OptimStep]) -> list[OptimStepOutput | Failed]:
        return [self._step(op) for op in ops]

    @np.errstate(all="ignore")
    def _step(self, op: tinsmith.OptimStep) -> OptimStepOutput | Failed:
        state = self._states[op.model_id]
        norm = float(np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in state.gradients.values())))
        result = tinsmith.step_result(norm, op.adam)  # refuses a gradient that is not finite
        refused = isinstance(result, Failed)
        self._states[op.model_id] = replace(state, gradients={}) if refused else _adamw(state, op.adam, norm)
        return result

    def capture_state(self, model_id: str) -> ModelState:
        return self._states[model_id]

    def restore_state(self, model_id: str, state: ModelState) -> None:
        self._states[model_id] = state

    def publish(self, model_id: str, snapshot_id: str) -> tinsmith.Snapshot:
        return tinsmith.HostSnapshot(snapshot_id, self._states[model_id].lora, self._states[model_id].weights)


@np.errstate(all="ignore")
def _adamw(state: ModelState, adam: AdamParams, norm: float) -> ModelState:
    """Step as torch's AdamW does, in float64, and clear the pending gradient."""
    zeros = {name: np.zeros(weight.shape) for name, weight in state.weights.items()}
    g, m, v = ({**zeros, **each} for each in (state.gradients, state.adam_m, state.adam_v))
    clip = min(1.0, adam.grad_clip_norm / (norm + 1e-6)) if adam.grad_clip_norm > 0 else 1.0
    step, weights = state.step + 1, dict(state.weights)
    for name, weight in state.weights.items():
        m[name] = adam.beta1 * m[name] + (1 - adam.beta1) * clip * g[name].astype(np.float64)
        v[name] = adam.beta2 * v[name] + (1 - adam.beta2) * (clip * g[name].astype(np.float64)) ** 2
        update = m[name] / (1 - adam.beta1**step) / (np.sqrt(v[name] / (1 - adam.beta2**step)) + adam.eps)
        decayed = (1 - adam.learning_rate * adam.weight_decay) * weight.astype(np.float64)
        weights[name] = decayed - adam.learning_rate * update
    weights, m, v = ({n: a.astype(np.float32) for n, a in each.items()} for each in (weights, m, v))
    return ModelState(lora=state.lora, weights=weights, adam_m=m, adam_v=v, step=step)


@tinsmith.hookimpl
def tinsmith_register_backends() -> tinsmith.BackendSpec[SkeletonConfig]:
    return tinsmith.BackendSpec(
        name="skeleton",
        config=SkeletonConfig,
        create=SkeletonBackend,
        description="guesses the next token from this one",
        needs_model_path=False,  # it brings its own model
        samples=False,  # it only trains
    )
