"""A token for each of 256 sequences, of the vocabulary of Qwen3, beside vLLM's own way and the operations of torch."""

from collections.abc import Callable

import numpy as np
import torch

from gpu_parts.common import Options, Report, bandwidth_limit, needs, seconds
from tinsmith_vllm import draws

REPEATS = 20


def run(options: Options) -> Report:
    if not options.toy:
        needs("triton")
    rows, vocabulary = (8, 5000) if options.toy else (256, 151_936)
    logits = 3 * torch.randn(rows, vocabulary, device=options.device)
    where = draws.quantiles(np.arange(rows), np.arange(rows))
    quantiles = torch.from_numpy(where).to(options.device)

    def logprobs() -> torch.Tensor:
        return logits.log_softmax(dim=-1, dtype=torch.float32)

    def drawn() -> torch.Tensor:
        return draws.draw(logits, where)

    def by_torch() -> torch.Tensor:
        return draws.draw_by_torch(logits, quantiles)

    def as_vllm() -> torch.Tensor:
        shares = logits.softmax(dim=-1, dtype=torch.float32)
        return shares.div_(torch.empty_like(shares).exponential_()).argmax(dim=-1)

    read_twice = 2 * logits.numel() * logits.element_size() / bandwidth_limit(options)
    works = {"logprobs": logprobs, "draw": drawn, "draw_by_torch": by_torch, "draw_as_vllm": as_vllm}
    took = {name: 1000 * _seconds(work, options) for name, work in works.items()}
    return {
        "rows": rows,
        "vocabulary": vocabulary,
        **{f"{name}_ms": each for name, each in took.items()},
        "share_of_bandwidth_limit": 1000 * read_twice / took["draw"],
        "draw_mib": _peak_mib(drawn, options),
        "draw_by_torch_mib": _peak_mib(by_torch, options),
        "same_tokens_as_cpu": bool(torch.equal(drawn().cpu(), draws.draw(logits.cpu(), where))),
    }


def _seconds(work: Callable[[], object], options: Options) -> float:
    """Measure several at once: the host launches the next while the device computes, as in a step of vLLM."""

    def all_of_them() -> None:
        for _ in range(REPEATS):
            work()

    return seconds(all_of_them, options.device, options.repeats) / REPEATS


def _peak_mib(work: Callable[[], object], options: Options) -> float | None:
    """Return what it takes of the device beside its arguments."""
    if options.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(options.device)
    before = torch.cuda.memory_allocated(options.device)
    work()
    return (torch.cuda.max_memory_allocated(options.device) - before) / 2**20
