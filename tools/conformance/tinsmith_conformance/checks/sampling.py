"""Drawn tokens, and the statements about them."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from tinsmith_conformance.data import OTHER_TOKENS, TOKENS, learned
from tinsmith_conformance.oracle import Floats
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import Sampler, Tester, floats, tokens_of
from tinsmith_conformance.verdicts import expect, skip

GROUP: Final = Group("sampling", "What is drawn, and its statistics.")

_AGREE: Final = 2e-3
_STOP, _LENGTH = 0, 1
_INTEGERS: Final = {2: "<i8", 3: "<i4"}  # by dtype


def _scores(sequence: Any) -> Floats:
    return floats(sequence.logprobs)


@GROUP.check
def lengths(t: Tester) -> None:
    """A sample that nothing stops has max_tokens tokens.

    Answers are cut short.
    """
    lengths = {len(each) for each in t.sampler().draw(n=32, max_tokens=30, temperature=2.0)}
    expect(lengths == {30}, f"samples have {sorted(lengths)} tokens; 30 were asked for, with stop=[]")


@GROUP.check
def reason_of_length(t: Tester) -> None:
    """Its stop reason is 'length'.

    Recipes take cut answers for whole ones.
    """
    expect(t.sampler().sample(max_tokens=3).sequences[0].stop_reason == _LENGTH, "it is another one")


@GROUP.check
def seeds_repeat(t: Tester) -> None:
    """One seed gives the same tokens again.

    Evaluations cannot be repeated.
    """
    sampler = t.sampler()
    first, again = (sampler.draw(n=2, max_tokens=8, seed=3) for _ in range(2))
    expect(first == again, f"{first}, then {again}")


@GROUP.check
def seeds_differ(t: Tester) -> None:
    """Ten seeds give more than one sample.

    Every rollout is the same.
    """
    sampler = t.sampler()
    drawn = {tuple(sampler.draw(max_tokens=8, seed=seed, temperature=1.5)[0]) for seed in range(10)}
    expect(len(drawn) > 1, "all are the same")


@GROUP.check
def no_seed(t: Tester) -> None:
    """Samples without a seed differ from each other.

    Every rollout is the same.
    """
    sampler = t.sampler()
    drawn = {tuple(sampler.draw(max_tokens=8, temperature=1.5)[0]) for _ in range(10)}
    expect(len(drawn) > 1, "all are the same")


@GROUP.check
def samples_of_one_request(t: Tester) -> None:
    """Samples of one request differ from each other.

    Groups for GRPO hold one answer many times, and give no gradient.
    """
    drawn = {tuple(each) for each in t.sampler().draw(n=10, max_tokens=8, seed=1, temperature=1.5)}
    expect(len(drawn) > 1, "all are the same")


@GROUP.each([("the largest", 2**63 - 1), ("zero", 0)])
def all_seeds(t: Tester, case: tuple[str, int]) -> None:
    """A seed may be {case} of 64 bits.

    Seeds made by hashing are refused, or fail other users' samples.
    """
    t.sampler().draw(seed=case[1])


@GROUP.check
def greedy_repeats(t: Tester) -> None:
    """Temperature 0 gives the same tokens for all seeds.

    Greedy evaluations are noisy.
    """
    sampler = t.sampler()
    drawn = {tuple(sampler.draw(max_tokens=6, temperature=0, seed=seed)[0]) for seed in range(3)}
    expect(len(drawn) == 1, f"they are {drawn}")


@GROUP.check
def greedy_is_best(t: Tester) -> None:
    """Temperature 0 draws the most probable token.

    Greedy evaluations measure another model.
    """
    answer = t.sampler().sample(max_tokens=1, temperature=0, _topk_sample_logprobs=2)
    best = np.frombuffer(answer.sequences[0].topk_sampled_logprobs.token_ids, "<i4")
    expect(len(best) == 2, "topk_sample_logprobs were asked for, and are absent")
    expect(tokens_of(answer.sequences[0])[0] == best[0], "another one is more probable")


@GROUP.check
def top_k_of_one(t: Tester) -> None:
    """top_k of 1 is greedy.

    top_k is ignored.
    """
    sampler = t.sampler()
    greedy = sampler.draw(max_tokens=5, temperature=0)
    drawn = sampler.draw(n=4, max_tokens=5, top_k=1, temperature=2.0)
    expect(all(each == greedy[0] for each in drawn), "other tokens were drawn")


@GROUP.check
def tiny_top_p(t: Tester) -> None:
    """A tiny top_p is greedy.

    top_p is ignored.
    """
    sampler = t.sampler()
    greedy = sampler.draw(max_tokens=5, temperature=0)
    drawn = sampler.draw(n=4, max_tokens=5, top_p=1e-6)
    expect(all(each == greedy[0] for each in drawn), "other tokens were drawn")


@GROUP.check
def logprobs_are_the_trainers(t: Tester) -> None:
    """Logprobs of sampled tokens are those that training returns for them.

    The ratios of every RL loss are wrong.
    """
    model = t.model()
    for _ in range(3):
        model.step([learned()], learning_rate=0.05)
    sequence = model.sampler().sample(max_tokens=5).sequences[0]
    whole = model.logprobs((*TOKENS, *tokens_of(sequence)))[len(TOKENS) - 1 :]
    off = np.abs(whole - _scores(sequence)).max()
    expect(off < _AGREE, f"they differ by {off:.2g} nats")


def _one_token(sampler: Sampler, many: int = 512, **params: Any) -> tuple[Counter[int], dict[int, float]]:
    """Draw many single tokens. Return how often each came, and its probability as the server says it."""
    seen: Counter[int] = Counter()
    said: dict[int, float] = {}
    for start in range(0, many, 64):
        for sequence in sampler.sample(n=64, max_tokens=1, seed=100 + start, **params).sequences:
            token = tokens_of(sequence)[0]
            seen[token] += 1
            said[token] = float(np.exp(_scores(sequence)[0]))
    return seen, said


def _chi_square(seen: Counter[int], wanted: dict[int, float]) -> None:
    """Compare by Pearson's statistic, rare tokens taken together. It would be this far off once in a million times."""
    total = sum(seen.values())
    common = [token for token, probability in wanted.items() if probability * total >= 5]
    rest = 1 - sum(wanted[token] for token in common)
    cells = [(seen[token], wanted[token] * total) for token in common]
    others = total - sum(seen[token] for token in common)
    if rest * total >= 5:
        cells.append((others, rest * total))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = max(1, len(cells) - 1)
    limit = freedom + 4.9 * np.sqrt(2 * freedom) + 16  # above the quantile of 1 - 1e-6 for any freedom
    expect(statistic < limit, f"the statistic is {statistic:.1f} with {freedom} degrees of freedom, above {limit:.1f}")


@GROUP.each([("temperature 1", 1.0), ("temperature 0.6", 0.6), ("temperature 1.7", 1.7)])
def frequencies(t: Tester, case: tuple[str, float]) -> None:
    """At {case}, tokens come as often as their logprobs say.

    Rollouts are off policy, and nobody can tell.
    """
    seen, said = _one_token(t.sampler(), 2048, temperature=case[1])
    _chi_square(seen, said)


@GROUP.check
def tempered_logprobs(t: Tester) -> None:
    """Logprobs of sampled tokens are those at the request's temperature.

    Ratios of RL losses are wrong for every temperature but 1.
    """
    model = t.model()
    sampler = model.sampler()
    _, plain = _one_token(sampler, temperature=1.0)
    _, cold = _one_token(sampler, temperature=0.5)
    both = sorted(plain.keys() & cold.keys(), key=lambda token: -plain[token])[:6]
    expect(len(both) > 1, "too few tokens were drawn twice")
    first = both[0]
    for token in both[1:]:
        ratio = np.log(cold[token] / cold[first])
        wanted = 2 * np.log(plain[token] / plain[first])
        expect(abs(ratio - wanted) < 0.01, f"at temperature 0.5 a log ratio is {ratio:.4f}; it must be {wanted:.4f}")


@GROUP.check
def top_k_keeps_k(t: Tester) -> None:
    """top_k draws from the k most probable tokens.

    top_k cuts elsewhere, or not at all.
    """
    sampler = t.sampler()
    seen, _ = _one_token(sampler, top_k=3)
    best = np.frombuffer(
        sampler.sample(max_tokens=1, _topk_sample_logprobs=3).sequences[0].topk_sampled_logprobs.token_ids, "<i4"
    )
    expect(set(seen) <= set(best.tolist()), f"{sorted(seen)} were drawn; the best are {sorted(best.tolist())}")


@GROUP.check
def top_p_keeps_p(t: Tester) -> None:
    """top_p draws from the most probable tokens that reach it.

    top_p cuts elsewhere, or not at all.
    """
    sampler = t.sampler()
    answer = sampler.sample(max_tokens=1, _topk_sample_logprobs=20).sequences[0].topk_sampled_logprobs
    tokens, scores = np.frombuffer(answer.token_ids, "<i4"), np.exp(floats(answer.logprobs))
    kept = int(np.searchsorted(np.cumsum(scores), scores[0] + scores[1] / 2)) + 1
    seen, _ = _one_token(sampler, top_p=float(scores[0] + scores[1] / 2))
    expect(set(seen) <= set(tokens[:kept].tolist()), f"{sorted(seen)} were drawn; {kept} tokens reach top_p")


@GROUP.check
def stop_tokens_stay(t: Tester) -> None:
    """A stop token ends a sample, stays in it, and is the reason.

    The cookbook takes every answer for cut off; RL never trains on the end.
    """
    sampler = t.sampler()
    drawn = sampler.draw(max_tokens=6, temperature=0)[0]
    sequence = sampler.sample(max_tokens=6, temperature=0, stop=[drawn[2]]).sequences[0]
    wanted = drawn[: drawn.index(drawn[2]) + 1]
    expect(tokens_of(sequence) == wanted, f"the tokens are {tokens_of(sequence)}; they must be {wanted}")
    expect(sequence.stop_reason == _STOP, "the stop reason is not 'stop'")
    expect(len(_scores(sequence)) == len(wanted), "the stop token has no logprob")


@GROUP.check
def last_token_stops(t: Tester) -> None:
    """A stop token in the last place is the reason, not the length.

    Whole answers are taken for cut ones.
    """
    sampler = t.sampler()
    drawn = sampler.draw(max_tokens=1, temperature=0)[0]
    sequence = sampler.sample(max_tokens=1, temperature=0, stop=drawn).sequences[0]
    expect(sequence.stop_reason == _STOP, "the stop reason is 'length'")


@GROUP.check
def prompt_logprobs(t: Tester) -> None:
    """Logprobs of a prompt are one for each token, and none for the first.

    compute_logprobs is off by one: KL penalties are of the wrong tokens.
    """
    answer = t.sampler().sample(max_tokens=1, _prompt_logprobs=True)
    scores = floats(answer.prompt_logprobs)
    expect(len(scores) == len(TOKENS), f"{len(scores)} logprobs for {len(TOKENS)} tokens")
    expect(np.isnan(scores[0]) and np.isfinite(scores[1:]).all(), f"they are {scores}")


@GROUP.check
def prompt_logprobs_are_the_trainers(t: Tester) -> None:
    """Logprobs of a prompt are those that training returns for it.

    KL penalties and preference losses compare two models.
    """
    model = t.model()
    model.step([learned()], learning_rate=0.05)
    off = np.abs(model.sampler().scores(OTHER_TOKENS) - model.logprobs(OTHER_TOKENS)).max()
    expect(off < _AGREE, f"they differ by {off:.2g} nats")


@GROUP.check
def prompt_logprobs_ignore_temperature(t: Tester) -> None:
    """Logprobs of a prompt are those at temperature 1, whatever the request's is.

    KL penalties depend on the temperature of rollouts.
    """
    sampler = t.sampler()
    warm = floats(sampler.sample(max_tokens=1, temperature=0.3, _prompt_logprobs=True).prompt_logprobs)[1:]
    expect(np.allclose(warm, sampler.scores(), atol=1e-5), "they differ")


@GROUP.check
def prompt_logprobs_only_if_asked(t: Tester) -> None:
    """Logprobs of a prompt are absent if they were not asked for.

    Long prompts cost what nobody reads.
    """
    expect(not t.sampler().sample().prompt_logprobs, "they are there")


@GROUP.check
def last_of_the_prompt(t: Tester) -> None:
    """prompt_logprobs_last_n scores the last n tokens and no others.

    The SDK raises for every such request.
    """
    sampler = t.sampler()
    scores = floats(sampler.sample(max_tokens=1, _prompt_logprobs=True, _prompt_logprobs_last_n=3).prompt_logprobs)
    expect(np.isnan(scores[:-3]).all(), "earlier tokens are scored")
    expect(np.allclose(scores[-3:], sampler.scores()[-3:], atol=1e-5), "the last ones differ")


@GROUP.check
def best_of_the_prompt(t: Tester) -> None:
    """topk_prompt_logprobs has k rows of the best tokens, best first, and none for the first token.

    Distillation learns from the wrong tokens.
    """
    top = t.sampler().sample(max_tokens=1, _prompt_logprobs=True, _topk_prompt_logprobs=3).topk_prompt_logprobs
    expect((top.length, top.k) == (len(TOKENS), 3), f"length {top.length}, k {top.k}")
    scores = floats(top.logprobs).reshape(-1, 3)
    expect((np.diff(scores[1:], axis=1) <= 0).all(), "they are not sorted")
    first = np.frombuffer(top.token_ids, "<i4").reshape(-1, 3)[0, 0], scores[0, 0]
    expect(first == (0, np.float32(-99999.0)), f"the first row begins with {first}; it must say that there is none")


@GROUP.check
def best_agree_with_the_prompt(t: Tester) -> None:
    """topk_prompt_logprobs has the prompt's own logprob where its token is among the best.

    Rows are shifted by one.
    """
    sampler = t.sampler()
    drawn = sampler.draw(max_tokens=6, temperature=0)[0]  # each is the best after its predecessors
    answer = sampler.sample((*TOKENS, *drawn), max_tokens=1, _prompt_logprobs=True, _topk_prompt_logprobs=2)
    best, own = floats(answer.topk_prompt_logprobs.logprobs).reshape(-1, 2), floats(answer.prompt_logprobs)
    off = np.abs(best[-6:, 0] - own[-6:]).max()
    expect(off < 1e-3, f"they differ by {off:.2g}")


@GROUP.check
def best_of_samples(t: Tester) -> None:
    """topk_sample_logprobs has a row for each token, best first.

    Distillation on policy learns from the wrong tokens.
    """
    sequence = t.sampler().sample(max_tokens=4, temperature=0, _topk_sample_logprobs=2).sequences[0]
    top = sequence.topk_sampled_logprobs
    expect((top.length, top.k) == (4, 2), f"length {top.length}, k {top.k}")
    tokens = np.frombuffer(top.token_ids, "<i4").reshape(-1, 2)
    expect(tokens[:, 0].tolist() == tokens_of(sequence), "the first column is not what was drawn greedily")


@GROUP.check
def chosen_targets(t: Tester) -> None:
    """target_prompt_logprobs has the logprob of each target, and 0 where there is none.

    Recipes that weigh decisions read other tokens' scores.
    """
    sampler = t.sampler()
    targets = np.full((len(TOKENS) - 1, 2), -1)
    targets[:, 0] = TOKENS[1:]
    body = {"data": targets.ravel().tolist(), "dtype": "int64", "shape": list(targets.shape)}
    answer = t.http.post("asample", json=sampler.body(max_tokens=1, _target_prompt_logprobs=body))
    if not answer.is_success:
        t.refused(answer)
        skip(f"it is not offered: {answer.text[:200]}")
    result = sampler.send(sampler.body(max_tokens=1, _target_prompt_logprobs=body)).result().target_prompt_logprobs
    scores = floats(result.dense).reshape(targets.shape)
    expect(np.allclose(scores[:, 0], sampler.scores(), atol=1e-4), "they are not those of the prompt")
    expect((scores[:, 1] == 0).all(), "a place without a target is scored")


@GROUP.check
def no_max_tokens(t: Tester) -> None:
    """A sample without max_tokens ends, or is refused at once.

    It never ends.
    """
    sampler = t.sampler()
    stop = sampler.draw(max_tokens=1, temperature=0)
    body = sampler.body(temperature=0, stop=stop[0])
    del body["sampling_params"]["max_tokens"]
    answer = t.http.post("asample", json=body)
    if answer.is_success:
        sampler.send(body).result()
    else:
        t.refused(answer)


@GROUP.check
def too_long(t: Tester) -> None:
    """A prompt with more tokens to draw than the context holds is refused by HTTP, and says how long it is.

    Rollouts fail without a reason: the cookbook looks for this error.
    """
    t.refused(t.http.post("asample", json=t.sampler().body(max_tokens=10**7)), 400, 422)


@GROUP.check
def many_in_flight(t: Tester) -> None:
    """Sixty-four samples in flight are all answered.

    Groups of rollouts fail, or sessions expire meanwhile.
    """
    sampler = t.sampler()
    bodies = [sampler.body(max_tokens=4) for _ in range(64)]
    with ThreadPoolExecutor(16) as pool:
        drawn = list(pool.map(lambda body: len(sampler.send(body).result().sequences), bodies))
    expect(drawn == [1] * 64, "some are missing")


@GROUP.check
def company_of_samples(t: Tester) -> None:
    """A sample's tokens do not depend on how many are drawn with it.

    Seeds repeat only in the same company.
    """
    sampler = t.sampler()
    one, many = (sampler.draw(n=n, max_tokens=6, seed=8)[0] for n in (1, 5))
    expect(one == many, f"{one} alone, {many} as the first of five")


@GROUP.check
def cancelling(t: Tester) -> None:
    """A sample can be cancelled.

    Rollouts that nobody waits for keep the server busy.
    """
    sampler = t.sampler()
    drawn = sampler.send(sampler.body(max_tokens=64))
    answer = t.http.post("cancel_future", json={"request_id": drawn.id})
    expect(answer.is_success, f"status {answer.status_code}: {answer.text[:200]}")
    drawn.finished()


@GROUP.check
def order_of_samples(t: Tester) -> None:
    """Samples of one request come in the order of their sequence ids: the first comes from the seed alone.

    Provenance of tokens names another sample.
    """
    sampler = t.sampler()
    first, again = (sampler.draw(n=3, max_tokens=6, seed=4) for _ in range(2))
    expect(first == again, "the order differs between two requests")


@GROUP.check
def cached_tokens(t: Tester) -> None:
    """prompt_cache_hit_tokens is a count within the prompt.

    Logs of the cookbook show nonsense.
    """
    hits = t.sampler().sample().prompt_cache_hit_tokens
    expect(0 <= hits <= len(TOKENS), f"it is {hits}")


@GROUP.check
def alternatives_of_the_prompt(t: Tester) -> None:
    """prompt_alt_tokens_k draws tokens for each place of the prompt with their logprobs, or is refused by name.

    The SDK raises an error after the sample was paid for, or the logprobs are those of other tokens.
    """
    sampler, shape = t.sampler(), (len(TOKENS) - 1, 3)
    body = sampler.body(max_tokens=1, _prompt_alt_tokens_k=shape[1])
    answer = t.http.post("asample", json=body)
    if not answer.is_success:
        words = t.refused(answer)
        expect("prompt_alt_tokens_k" in words, f"the refusal does not name it: {words}")
        return
    drawn = sampler.send(body).result().prompt_alt_tokens
    ids = np.frombuffer(drawn.tokens.dense, _INTEGERS.get(drawn.tokens.dtype, "<i8"))
    scores = floats(drawn.logprobs.dense)
    expect(ids.size == scores.size == shape[0] * shape[1], f"{ids.size} tokens, {scores.size} logprobs for {shape}")
    asked = {"data": ids.tolist(), "dtype": "int64", "shape": list(shape)}
    scored = sampler.sample(max_tokens=1, _target_prompt_logprobs=asked).target_prompt_logprobs
    expect(np.allclose(scores, floats(scored.dense), atol=1e-4), "their logprobs are not those of the prompt's places")
