"""Checkpoints: their contents, and training that resumes from them."""

from __future__ import annotations

from typing import Final

import numpy as np

from tinsmith_conformance.data import learned
from tinsmith_conformance.oracle import Floats
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import Model, Tester
from tinsmith_conformance.verdicts import RequestFailedError, expect

GROUP: Final = Group("resume", "Checkpoints: what they hold, and how runs go on from them.")


def _trained(t: Tester, steps: int = 3) -> Model:
    model = t.model()
    for _ in range(steps):
        model.step([learned()])
    return model


def _after(model: Model, steps: int = 2) -> Floats:
    for _ in range(steps):
        model.step([learned()])
    return model.logprobs()


def _equal(a: Floats, b: Floats, what: str) -> None:
    expect(np.array_equal(a, b), f"{what}: the logprobs differ by {np.abs(a - b).max():.2g}")


@GROUP.check
def same_weights(t: Tester) -> None:
    """A model from a checkpoint has its weights, bit for bit.

    A resumed run starts from other weights.
    """
    model = _trained(t)
    _equal(t.model_from(model.save(), optimizer=True).logprobs(), model.logprobs(), "after loading")


@GROUP.check
def same_run(t: Tester) -> None:
    """A run goes on from a checkpoint with its optimizer as if it had not stopped, bit for bit.

    Each interruption changes what is trained.
    """
    model = _trained(t)
    resumed = t.model_from(model.save(), optimizer=True)
    _equal(_after(resumed), _after(model), "two steps later")


@GROUP.check
def without_optimizer(t: Tester) -> None:
    """A model from a checkpoint without its optimizer starts with fresh moments.

    Fine-tuning from a checkpoint inherits the momentum of another run.
    """
    model = _trained(t)
    path = model.save()
    fresh, same = t.model_from(path, optimizer=False), t.model_from(path, optimizer=False)
    expect(not np.array_equal(_after(fresh, 1), _after(model, 1)), "it has the optimizer's moments")
    _equal(_after(same, 1), fresh.logprobs(), "two models from one checkpoint")


@GROUP.check
def loading_in_place(t: Tester) -> None:
    """load_state brings a model back to a checkpoint, bit for bit.

    Scripts that go back to their best checkpoint do not.
    """
    model = _trained(t)
    path, before = model.save(), model.logprobs()
    wanted = _after(model)
    model.load(path)
    _equal(model.logprobs(), before, "after loading")
    _equal(_after(model), wanted, "two steps later")


@GROUP.check
def loading_in_place_without_optimizer(t: Tester) -> None:
    """load_state without the optimizer resets the moments.

    Old momentum acts on loaded weights.
    """
    model = _trained(t)
    path = model.save()
    model.load(path, optimizer=False)
    fresh = t.model_from(path, optimizer=False)
    _equal(_after(model, 1), _after(fresh, 1), "a step later")


@GROUP.check
def in_another_session(t: Tester) -> None:
    """A checkpoint can be loaded after its session has ended.

    A run cannot be resumed once its script has ended.
    """
    model = _trained(t)
    path, wanted = model.save(), model.logprobs()
    t.http.post(f"sessions/{t.session}/finish", json={"reason": {"type": "success"}})
    with Tester(t.target) as later:
        _equal(later.model_from(path, optimizer=True).logprobs(), wanted, "in the next session")


@GROUP.check
def pending_gradients(t: Tester) -> None:
    """Saving between a pass and its step does not change the step.

    A checkpoint in the middle of gradient accumulation loses a batch.
    """
    model, clean = t.model(), t.model()
    for each in (model, clean):
        each.forward_backward([learned()]).result()
    model.save()
    for each in (model, clean):
        each.optim_step(learning_rate=0.01).result()
    _equal(model.logprobs(), clean.logprobs(), "after the step")


@GROUP.check
def rank_of_the_checkpoint(t: Tester) -> None:
    """A model from a checkpoint has its rank.

    Resuming needs what nobody wrote down.
    """
    path = t.model(rank=4).save()
    rank = t.model_from(path, optimizer=True).info().get("lora_rank")
    expect(rank == 4, f"lora_rank is {rank}")


@GROUP.check
def two_of_one(t: Tester) -> None:
    """Two models from one checkpoint are trained apart.

    Branches of a run overwrite each other.
    """
    path = _trained(t).save()
    first, second = t.model_from(path, optimizer=True), t.model_from(path, optimizer=True)
    before = second.logprobs()
    _after(first)
    _equal(second.logprobs(), before, "after the other one was trained")


@GROUP.check
def the_original_goes_on(t: Tester) -> None:
    """Saving does not change the model.

    Runs with checkpoints train another model than runs without.
    """
    saved, plain = _trained(t), _trained(t)
    saved.save()
    _equal(_after(saved), _after(plain), "two steps later")


@GROUP.check
def seeds(t: Tester) -> None:
    """Two models with one seed are the same, and with two seeds are not.

    Runs cannot be repeated, or all begin alike.
    """
    first, same, other = (_trained(t, 0) if seed == 1 else t.model(seed=seed) for seed in (1, 1, 2))
    ours, theirs, others = (_after(each) for each in (first, same, other))
    _equal(ours, theirs, "with one seed")
    expect(not np.array_equal(ours, others), "two seeds give one model")


@GROUP.check
def new_adapters_change_nothing(t: Tester) -> None:
    """A new adapter leaves the base model as it is, whatever its seed.

    Training begins from a damaged model.
    """
    _equal(t.model(seed=1).logprobs(), t.model(seed=2).logprobs(), "with two seeds")


@GROUP.check
def names_are_taken(t: Tester) -> None:
    """A second save under a name fails with category 'user', not with 409.

    A checkpoint is overwritten without a word, or the SDK repeats for five minutes.
    """
    model = t.model()
    model.save("name")
    try:
        model.save("name")
    except RequestFailedError as error:
        expect(error.category == "user", f"the category is '{error.category}'")
        return
    expect(False, "it succeeded")  # noqa: FBT003 - a statement reads worse


@GROUP.check
def overwriting(t: Tester) -> None:
    """A save with `overwrite` replaces the checkpoint.

    Rolling checkpoints stay at the first one.
    """
    model = t.model()
    model.save("name")
    model.step([learned()])
    path = model.save("name", overwrite=True)
    _equal(t.model_from(path, optimizer=True).logprobs(), model.logprobs(), "after loading")


@GROUP.check
def one_name_per_kind(t: Tester) -> None:
    """The same name can be saved for training and for sampling.

    The cookbook's checkpoints, which it saves as both, fail.
    """
    model = t.model()
    paths = model.save("000100"), model.save_for_sampling("000100")
    expect(paths[0] == f"tinker://{model.id}/weights/000100", f"the path is {paths[0]}")
    expect(paths[1] == f"tinker://{model.id}/sampler_weights/000100", f"the path is {paths[1]}")


@GROUP.each(
    [
        ("a checkpoint that is not there", "tinker://{run}/weights/none"),
        ("a path of another form", "/etc/passwd"),
        ("a path that leads outside", "tinker://{run}/weights/..%2F..%2Fetc"),
    ]
)
def unknown_paths(t: Tester, case: tuple[str, str]) -> None:
    """Loading {case} is refused.

    A new model is trained in place of the one that was meant, or files of the server are read.
    """
    path = case[1].format(run=t.model().id)
    body = {"session_id": t.session, "model_seq_id": 40, "path": path, "optimizer": True}
    t.refusal("load_weights", body)


@GROUP.each(["a/b", "../up", "", "."])
def names(t: Tester, case: str) -> None:
    """A checkpoint cannot be called '{case}'.

    Its path cannot be parsed, or leads outside.
    """
    model = t.model()
    t.refusal("save_weights", {"model_id": model.id, "seq_id": 1, "path": case, "overwrite": False})


@GROUP.check
def sampler_weights_do_not_train(t: Tester) -> None:
    """Weights for sampling can be loaded without an optimizer, or are refused by name.

    Training begins from something else.
    """
    path = _trained(t).save_for_sampling()
    body = {"session_id": t.session, "model_seq_id": 41, "path": path, "optimizer": True}
    answer = t.http.post("load_weights", json=body)
    t.refused(answer)


@GROUP.check
def kept_metadata(t: Tester) -> None:
    """Metadata of a checkpoint are returned as they were saved.

    Scripts that keep their step there start from step 0.
    """
    model = t.model()
    model.save("named", user_metadata={"step": "7"})
    found = t.get(f"training_runs/{model.id}/checkpoints")["checkpoints"]
    expect(found[0].get("user_metadata") == {"step": "7"}, f"they are {found[0].get('user_metadata')}")
