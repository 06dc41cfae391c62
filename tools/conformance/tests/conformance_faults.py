"""One-line faults of our own server, each with the check that must fail. Most were found in other servers.

A fault is planted into a server that runs in this process: the functions that it changes get the code of the changed
source.
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import CodeType, FunctionType, ModuleType


@dataclass(frozen=True)
class Fault:
    module: str
    line: str  # what the source has, once
    instead: str  # in as many lines
    check: str  # by its title

    @contextmanager
    def planted(self) -> Iterator[None]:
        module = importlib.import_module(self.module)
        source = Path(inspect.getfile(module)).read_text(encoding="utf-8")
        assert source.count(self.line) == 1, f"{self.module} has {source.count(self.line)} times: {self.line}"
        before = _codes(source)
        changed = {
            _function(module, name): code
            for name, code in _codes(source.replace(self.line, self.instead)).items()
            if code != before[name]
        }
        assert changed, "no function is changed"
        kept = {function: function.__code__ for function in changed}
        try:
            for function, code in changed.items():
                function.__code__ = code
            yield
        finally:
            for function, code in kept.items():
                function.__code__ = code


def _codes(source: str) -> Mapping[str, CodeType]:
    """Return the code of each function and method of a module, by its qualified name."""
    found: dict[str, CodeType] = {}
    inside = [compile(source, "<module>", "exec", dont_inherit=True)]
    while inside:
        for each in inside.pop().co_consts:
            if isinstance(each, CodeType):
                if each.co_flags & inspect.CO_NEWLOCALS:
                    found[each.co_qualname] = each
                else:
                    inside.append(each)  # a class
    return found


def _function(module: ModuleType, name: str) -> FunctionType:
    found: object = reduce(getattr, name.split("."), module)
    function = inspect.unwrap(found) if callable(found) else found
    assert isinstance(function, FunctionType), name
    return function


_TRAINING, _MODEL = "tinsmith.builtin.toy_training", "tinsmith.builtin.toy_model"
_SAMPLING, _BACKEND = "tinsmith.builtin.toy_sampling", "tinsmith.builtin.toy_backend"
_LOSSES, _TRANSLATE, _ANSWERS = "tinsmith.losses", "tinsmith.protocol.translate", "tinsmith.protocol.answers"
_ROUTES = "tinsmith.server.routes"
_MADE_KEYS = (
    "A key that was made over HTTP reads what its maker reads until it is deleted, and nobody else can delete it"
)

FAULTS = {
    # Training
    "gradients replace each other": Fault(
        _TRAINING,
        "self.gradients.get(name, 0.0) + gradient",
        "gradient",
        "Two passes before a step add up to one with the data of both",
    ),
    "weight decay is dropped": Fault(
        _TRAINING,
        "np.float64(1 - adam.learning_rate * adam.weight_decay)",
        "np.float64(1.0)",
        "Weight decay shrinks the weights by learning rate times decay, whatever the gradient",
    ),
    "grad_clip_norm is dropped": Fault(
        _TRAINING,
        "if adam.grad_clip_norm > 0 else 1.0",
        "if False else 1.0",
        "grad_clip_norm scales the gradient down to this norm",
    ),
    "the loss is a mean": Fault(
        _TRAINING,
        "loss=float(loss_TK.sum())",
        "loss=float(loss_TK.mean())",
        "The loss of cross_entropy is minus the sum of weight times logprob",
    ),
    "the gradient is a mean": Fault(
        _TRAINING,
        "gradients = model.backward(seen, dlogits_TV, adapter)",
        "gradients = model.backward(seen, dlogits_TV / shape[0], adapter)",
        "A small step lowers the loss by its size times the gradient's square",
    ),
    "the gradient is divided by the sum of weights": Fault(
        _TRAINING,
        "gradients = model.backward(seen, dlogits_TV, adapter)",
        "gradients = model.backward(seen, dlogits_TV / -dlogp_TK.sum(), adapter)",
        "Weights of two give a gradient twice as large",
    ),
    "negative weights are dropped": Fault(
        _TRAINING,
        "        dlogits_TV = -np.exp",
        "        dlogp_TK = np.minimum(dlogp_TK, 0); dlogits_TV = -np.exp",
        "A sequence with weight 1 and again with -1 gives no gradient",
    ),
    "a step keeps the gradient": Fault(
        _TRAINING, "        self.gradients = {}\n        if", "        pass\n        if", "A step clears the gradient"
    ),
    "the bias of the moments stays": Fault(
        _TRAINING,
        "m / (1 - adam.beta1**self.step)",
        "m",
        "The first step moves each weight by the learning rate, against its gradient",
    ),
    "beta2 is fixed": Fault(
        _TRAINING,
        "(1 - adam.beta2) * gradient**2",
        "0.05 * gradient**2",
        "Two steps with beta2 equal AdamW's in float64",
    ),
    "eps is inside the root": Fault(
        _TRAINING,
        "(np.sqrt(v_hat) + adam.eps)",
        "np.sqrt(v_hat + adam.eps)",
        "Two steps with a large eps equal AdamW's in float64",
    ),
    "moments are not kept": Fault(
        _TRAINING,
        "self.adam_m = self.adam_m | {name: m.astype(np.float32)}",
        "self.adam_m = {}",
        "A step without a pass moves the weights by their momentum, as torch's AdamW does",
    ),
    "a step that is not finite is taken": Fault(
        _TRAINING,
        "if refuses_step(norm, adam):",
        "if False:",
        "A step whose gradient is not finite leaves the weights as they are",
    ),
    "logprobs are shifted": Fault(
        _TRAINING,
        'logp_TK.reshape(datum.loss_inputs["target_tokens"].shape)',
        'np.roll(logp_TK.reshape(datum.loss_inputs["target_tokens"].shape), 1, 0)',
        "cross_entropy takes fractions as they are",
    ),
    "attention is always trained": Fault(
        _MODEL,
        "_Q_PROJ: lora.train_attn,",
        "_Q_PROJ: True,",
        "With train_mlp alone, no other part of the model is trained",
    ),
    "seeds are ignored": Fault(
        _MODEL,
        "[lora.seed % 2**64, index]",
        "[0, index]",
        "Two models with one seed are the same, and with two seeds are not",
    ),
    "a new adapter is not zero": Fault(
        _MODEL,
        "np.zeros((base.shape[0], lora.rank), np.float32)",
        "np.full((base.shape[0], lora.rank), 0.01 * lora.seed, np.float32)",
        "A new adapter leaves the base model as it is, whatever its seed",
    ),
    "the step's number is not restored": Fault(
        _BACKEND,
        "            step=state.step,",
        "            step=0,",
        "A run goes on from a checkpoint with its optimizer as if it had not stopped, bit for bit",
    ),
    "the second moments are not restored": Fault(
        _BACKEND,
        "adam_v=_copies(state.adam_v)",
        "adam_v={}",
        "load_state brings a model back to a checkpoint, bit for bit",
    ),
    # Losses
    "ppo takes the larger gain": Fault(
        _LOSSES,
        "-xp.minimum(plain, clipped), gradient",
        "-xp.maximum(plain, clipped), gradient",
        "The value of ppo equals its formula in float64",
    ),
    "ppo's gradient is not clipped": Fault(
        _LOSSES,
        "xp.where(plain <= clipped, -plain, 0.0 * plain)",
        "-plain",
        "The gradient of ppo equals its formula's in float64",
    ),
    "importance sampling is clipped": Fault(
        _LOSSES,
        'loss = -xp.exp(logp - inputs["logprobs"]) * inputs["advantages"]',
        'loss = -xp.minimum(xp.exp(logp - inputs["logprobs"]), 2.0 + 0 * logp) * inputs["advantages"]',
        "importance_sampling does not clip large ratios",
    ),
    "dro is without its half": Fault(
        _LOSSES,
        "0.5 * beta * drift * drift",
        "beta * drift * drift",
        "The value of dro equals its formula in float64",
    ),
    "gspo ignores its mask": Fault(
        _LOSSES,
        'inputs["sequence_ratio_mask"] != 0',
        'inputs["sequence_ratio_mask"] > -1',
        "The value of gspo equals its formula in float64",
    ),
    # Sampling
    "logprobs are those at temperature 1": Fault(
        _SAMPLING,
        "log_softmax(logits_V / (params.temperature or 1.0))",
        "log_softmax(logits_V)",
        "Logprobs of sampled tokens are those at the request's temperature",
    ),
    "top_k is ignored": Fault(_SAMPLING, "if params.top_k > 0:", "if False:", "top_k of 1 is greedy"),
    "top_p is ignored": Fault(_SAMPLING, "params.top_p * cumulative[-1]", "cumulative[-1]", "A tiny top_p is greedy"),
    "the stop token is cut off": Fault(
        _SAMPLING,
        "tokens=np.array(self.tokens, np.int32),",
        "tokens=np.array(self.tokens[:-1] if self._stopped else self.tokens, np.int32),",
        "A stop token ends a sample, stays in it, and is the reason",
    ),
    "every end is for its length": Fault(
        _SAMPLING,
        '"stop" if self._stopped else "length"',
        '"length"',
        "A stop token in the last place is the reason, not the length",
    ),
    "all samples of a request are one": Fault(
        _SAMPLING, "[op.params.seed, index]", "[op.params.seed, 0]", "Samples of one request differ from each other"
    ),
    "seeds of samples are ignored": Fault(
        _SAMPLING,
        "np.random.default_rng([op.params.seed, index])",
        "np.random.default_rng()",
        "One seed gives the same tokens again",
    ),
    "draws are biased": Fault(
        _SAMPLING,
        "threshold = rng.random() *",
        "threshold = rng.random() ** 1.5 *",
        "At temperature 1, tokens come as often as their logprobs say",
    ),
    "the first token of a prompt is scored": Fault(
        _SAMPLING,
        "np.full(len(op.prompt_P), np.nan, np.float32)",
        "np.full(len(op.prompt_P), 0.0, np.float32)",
        "Logprobs of a prompt are one for each token, and none for the first",
    ),
    "prompt logprobs are off by one": Fault(
        _SAMPLING,
        "logp_PV[position - 1, op.prompt_P[position]]",
        "logp_PV[position, op.prompt_P[position]]",
        "Logprobs of a prompt are those that training returns for it",
    ),
    "prompt_logprobs_last_n is ignored": Fault(
        _SAMPLING,
        "return 1 if last_n is None else",
        "return 1 if True else",
        "prompt_logprobs_last_n scores the last n tokens and no others",
    ),
    "the best of a prompt are off by one": Fault(
        _SAMPLING,
        "np.roll(logp_PV, 1, axis=0)",
        "logp_PV",
        "topk_prompt_logprobs has the prompt's own logprob where its token is among the best",
    ),
    "absent targets are scored": Fault(
        _SAMPLING,
        "np.where(targets < 0, 0.0, logprobs)",
        "logprobs",
        "target_prompt_logprobs has the logprob of each target, and 0 where there is none",
    ),
    "all snapshots of a model are the first": Fault(
        _BACKEND,
        "self.device.snapshots.get(op.snapshot_id)",
        "list(self.device.snapshots.values())[op.snapshot_id is not None]",
        "Several saved snapshots of a run are served, each with its own weights",
    ),
    "the base model is sampled": Fault(
        _BACKEND,
        "self.device.snapshots.get(op.snapshot_id)",
        "self.device.snapshots[None]",
        "A sampler scores as its model does",
    ),
    # The engine
    "a failed pass does not fail its step": Fault(
        "tinsmith.engine.training",
        "            if failed is not None:\n                await self.models.drop",
        "            if False:\n                await self.models.drop",
        "A step after a failed pass applies no part of its batch",
    ),
    "a discarded step keeps its gradient": Fault(
        "tinsmith.engine.training",
        "await self.models.drop_gradient(record.subject_id)",
        "pass",
        "The gradient of a failed window does not count in the next one",
    ),
    # The protocol
    "forward is forward_backward": Fault(
        _TRANSLATE,
        "ops.Forward if head.forward_only else ops.ForwardBackward",
        "ops.ForwardBackward",
        "A forward pass leaves no gradient",
    ),
    "stop=[] leaves the end of sequence": Fault(
        _TRANSLATE,
        "stop_at_eos=params.stop != [],",
        "stop_at_eos=True,",
        "A sample that nothing stops has max_tokens tokens",
    ),
    "records have no number of data": Fault(
        _ANSWERS,
        "num_datums=len(run)",
        "num_datums=0",
        "A pass returns one result for each datum, in order, and as long as its targets",
    ),
    "results of steps have an error": Fault(
        _ANSWERS,
        'return json_answer({"metrics": {',
        'return json_answer({"error": None, "metrics": {',
        "The result of a step that succeeded has no `error`",
    ),
    "sequence ids are left out": Fault(
        "tinsmith.server.sequence_ids",
        "for index in range(num_samples)]",
        "for index in range(0)]",
        "A call of asample answers with one sequence id for each sample",
    ),
    "an ended session may beat": Fault(
        f"{_ROUTES}.sessions",
        '    if session.ended is not None:\n        msg = f"session {body.session_id!r} has',
        '    if False:\n        msg = f"session {body.session_id!r} has',
        "The heartbeat of a finished session is answered with 410",
    ),
    "idempotency keys are ignored": Fault(
        f"{_ROUTES}.sessions",
        "idempotency_key=x_idempotency_key, by",
        "idempotency_key=None, by",
        "A session is made once for an idempotency key",
    ),
    "other content under a number is not seen": Fault(
        "tinsmith.sql_store.subjects.submitting",
        "if same.digest != operation.digest:",
        "if False:",
        "A number that comes again with other content is refused, and not answered with 409",
    ),
    # Rights and lists
    "owners are not compared": Fault(
        "tinsmith.server.auth",
        "    if record.tenant == caller.tenant:\n        return record\n",
        "    if True:\n        return record\n",
        "Nobody can train another's model",
    ),
    "results are anybody's": Fault(
        "tinsmith.server.auth",
        '_readable(await context.requests.get(request_id, _unreadable(caller)), caller, "request", request_id)',
        "await context.requests.get(request_id)",
        "Nobody can read another's result",
    ),
    "alternatives are scored one place off": Fault(
        _SAMPLING,
        "np.take_along_axis(logp_PV[:-1], token_ids, axis=-1)",
        "np.take_along_axis(logp_PV[1:], token_ids, axis=-1)",
        "prompt_alt_tokens_k draws tokens for each place of the prompt with their logprobs, or is refused by name",
    ),
    "inflight samplers stay behind": Fault(
        "tinsmith.engine.snapshots",
        "else self._newest[saved.model_id]",
        "else snapshot_id",
        "A sampler of kind 'inflight' follows later saves of this kind, or is refused by name",
    ),
    "recorded sequences are anybody's": Fault(
        "tinsmith.server.sequence_ids",
        'f"{tenant}\\0{signed}".encode()',
        "signed.encode()",
        "stable_reinforce trains on sequences that its user had recorded, or is refused by name",
    ),
    "every checkpoint is public": Fault(
        "tinsmith.server.auth",
        "found = record if record.public else",
        "found = record if True else",
        "Nobody can read about another's weights",
    ),
    "publishing does nothing": Fault(
        f"{_ROUTES}.runs",
        "replace(record, public=public)",
        "replace(record, public=False)",
        "A checkpoint can be published and made private, also twice",
    ),
    "the time to live is not set": Fault(
        f"{_ROUTES}.runs",
        "replace(record, expires_at=expires_at)",
        "record",
        "A checkpoint's time to live can be set, and taken back",
    ),
    "an unknown model is a bad request": Fault(
        "tinsmith_openai.models",
        "raise NoSuchModelError(str(error)) from error",
        "raise",
        "A model that is not there gets a 404, in the form of OpenAI's errors",
    ),
    "metadata of runs are dropped": Fault(
        f"{_ROUTES}.runs",
        "user_metadata=wire.as_text(run.user_metadata)",
        "user_metadata=None",
        "A run returns its metadata, as text",
    ),
    "copies are not made once": Fault(
        f"{_ROUTES}.copies",
        "idempotency_key=None if key is None else _KEY + key,",
        "idempotency_key=None,",
        "A copy of a checkpoint lives on when its source is deleted, and a repeat makes no second one",
    ),
    "a search of sessions ignores metadata": Fault(
        f"{_ROUTES}.searches",
        "and _has(wire.as_text(session.user_metadata) or {}, body.user_metadata)",
        "and True",
        "A search of sessions finds those with the metadata that it names, newest first in pages",
    ),
    "a search of checkpoints ignores the kind": Fault(
        f"{_ROUTES}.searches",
        "and body.checkpoint_type in {None, each.kind}",
        "and True",
        "A search of checkpoints finds those of the kind and with the metadata that it names",
    ),
    "ranks are not told": Fault(
        f"{_ROUTES}.weights",
        "lora_rank=lora.rank,",
        "lora_rank=32,",
        "weights_info tells base model and rank of a checkpoint",
    ),
    "the audit log is everybody's": Fault(
        f"{_ROUTES}.audit",
        "None if caller.admin else caller.tenant,",
        "None,",
        "The audit log tells who saved, published and deleted a checkpoint, and nobody else",
    ),
    "publishing is not in the audit log": Fault(
        "tinsmith.store.audit",
        "    if after.public != before.public:",
        "    if False:",
        "The audit log tells who saved, published and deleted a checkpoint, and nobody else",
    ),
    "a deleted key goes on": Fault(
        "tinsmith.sql_store.subjects.api_keys",
        "or _DELETE.run(tx.connection, key_id=key_id) == 0:",
        "or False:",
        _MADE_KEYS,
    ),
    "anybody deletes a key": Fault(
        "tinsmith.sql_store.subjects.api_keys", "tenant not in (None, found.tenant)", "False", _MADE_KEYS
    ),
    "the list of keys is everybody's": Fault(
        f"{_ROUTES}.api_keys", "tenant = visible_tenant(caller, access_scope)", "tenant = None", _MADE_KEYS
    ),
    "an uploaded adapter is twice as strong": Fault(
        "tinsmith.checkpoints.importing",
        "lora = replace(announced, alpha=lora.alpha)",
        "lora = replace(announced, alpha=2 * lora.alpha)",
        "An adapter that was exported can be uploaded by links, and computes the same",
    ),
    "recipients are ignored": Fault(
        _TRANSLATE,
        "        recipients=recipients,",
        "        recipients=(),",
        "An export for recipients is encrypted",
    ),
}
