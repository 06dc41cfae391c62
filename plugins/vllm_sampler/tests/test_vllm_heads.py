"""Adapters of the output head: what they add to each row, and that no row sees another's. No vLLM."""

import numpy as np
import pytest
import torch

from tinsmith_vllm.heads import HEAD_A, HEAD_B, HeadAdapter, Heads

HIDDEN, VOCABULARY, RANK = 64, 301, 8  # an odd vocabulary: rows of logits begin at any address
BASE = 0
ADAPTERS = {7: 8, 9: 3, 11: 1}  # ranks, by id
WITHOUT_HEAD = 13


def make(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Heads:
    return Heads(slots=4, hidden=HIDDEN, vocabulary=VOCABULARY, rank=RANK, dtype=dtype, device=torch.device(device))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32))


def adapter(adapter_id: int, scale: float = 1.5) -> HeadAdapter:
    rank = ADAPTERS[adapter_id]
    return HeadAdapter(
        0.1 * random(rank, HIDDEN, seed=adapter_id), 0.1 * random(VOCABULARY, rank, seed=adapter_id), scale
    )


def filled(order: list[int], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Heads:
    made = make(dtype, device)
    for slot, adapter_id in enumerate(order):
        made.put(slot, adapter_id, None if adapter_id == WITHOUT_HEAD else adapter(adapter_id))
    return made


ROWS = [7, BASE, 9, WITHOUT_HEAD, 7, 11, 9, 9, BASE, 7]


def added(made: Heads, ids: list[int], hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    out = logits.clone()
    made.add(out, hidden, np.array(ids, np.int64))
    return out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_each_row_gets_its_own(device: str, dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs the rows of an adapter are computed together; the memory is the CPU's."""
    empty, take = torch.empty, torch.Tensor.index_add_
    together = []
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, **_: empty(*shape, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "index_add_", lambda *given: together.append(1) or take(*given))
    hidden, logits = random(len(ROWS), HIDDEN).to(dtype), random(len(ROWS), VOCABULARY).to(dtype)
    found = added(filled([9, WITHOUT_HEAD, 7, 11], dtype, device), ROWS, hidden, logits)
    assert found.dtype == dtype
    assert len(together) == (len(ADAPTERS) if device == "cuda" else 0)
    for row, adapter_id in enumerate(ROWS):
        if adapter_id not in ADAPTERS:
            assert torch.equal(found[row], logits[row])
            continue
        head = adapter(adapter_id)
        expected = logits[row].double() + 1.5 * (head.B_Vr.double() @ (head.A_rH.double() @ hidden[row].double()))
        np.testing.assert_allclose(found[row].double(), expected, atol=atol, rtol=0)


def test_no_row_depends_on_the_others_nor_on_slots() -> None:
    hidden, logits = random(len(ROWS), HIDDEN), random(len(ROWS), VOCABULARY)
    together = added(filled([9, WITHOUT_HEAD, 7, 11]), ROWS, hidden, logits)
    for row, adapter_id in enumerate(ROWS):
        for order in ([7, 9, 11], [11, 7, WITHOUT_HEAD, 9]):
            alone = added(filled(order), [adapter_id], hidden[row : row + 1], logits[row : row + 1])
            assert torch.equal(alone[0], together[row]), (row, adapter_id)


def test_a_place_is_given_on() -> None:
    made = filled([7])
    made.put(0, 9, adapter(9))
    hidden, logits = random(2, HIDDEN), random(2, VOCABULARY)
    found = added(made, [7, 9], hidden, logits)
    assert torch.equal(found[0], logits[0]), "the last one is gone"
    assert torch.equal(found[1], added(filled([7, 9]), [BASE, 9], hidden, logits)[1])
    made.put(0, WITHOUT_HEAD, None)
    assert torch.equal(added(made, [9, WITHOUT_HEAD], hidden, logits), logits)


def test_a_prompt_is_scored_with_one_adapter_whatever_the_step_has() -> None:
    made, hidden, logits = filled([7, 9]), random(3, HIDDEN), random(3, VOCABULARY)
    expected = added(made, [9, 9, 9], hidden, logits)
    with made.scoring(9):
        assert torch.equal(added(made, [7, 7, BASE], hidden, logits), expected)
    with made.scoring(BASE):
        assert torch.equal(added(made, [7, 7, BASE], hidden, logits), logits)
    assert not torch.equal(added(made, [7, 7, BASE], hidden, logits), expected)


def test_the_part_of_the_head_is_taken_out_if_it_fits() -> None:
    others = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": random(2, HIDDEN)}
    assert make().take(others, 1.0) is None
    tensors = {**others, HEAD_A: random(2, HIDDEN), HEAD_B: random(VOCABULARY, 2)}
    taken = make().take(tensors, 2.0)
    assert taken is not None
    assert taken.scale == 2.0
    assert tensors.keys() == others.keys()
    for rank, vocabulary in ((2, VOCABULARY - 1), (RANK + 1, VOCABULARY)):
        odd = {HEAD_A: random(rank, HIDDEN), HEAD_B: random(vocabulary, rank)}
        with pytest.raises(
            ValueError, match=rf"lm_head has the shapes .*\[rank, {HIDDEN}\] and \[{VOCABULARY}, rank\]"
        ):
            make().take(odd, 1.0)
