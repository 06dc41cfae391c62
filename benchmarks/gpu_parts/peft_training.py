"""The same tokens through transformers and PEFT: one adapter, plain PyTorch, sequences of one length in a batch."""

import tempfile
from pathlib import Path

import torch

from gpu_parts.common import Options, Report, linear_parameters, matmul_limit, measured_again, needs, peak_gib, seconds

SEQUENCE, SEQUENCES = 1024, 2  # of a micro-batch: more logits than that fill the card


def run(options: Options) -> Report:
    needs("transformers", "peft")
    import peft
    import transformers

    limit = matmul_limit(options)
    length, rows = (64, 2) if options.toy else (SEQUENCE, SEQUENCES)
    with tempfile.TemporaryDirectory() as directory:
        shape = options.write_model(Path(directory))
        config = transformers.AutoConfig.from_pretrained(directory)
    with options.device:
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=options.dtype)  # type: ignore[no-untyped-call]
    lora = peft.LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)
    if not options.toy:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], fused=not options.toy)
    tokens = torch.randint(10, shape.vocab_size, (rows, length), device=options.device)

    def passes() -> None:
        for _ in range(options.tokens // tokens.numel()):
            model(input_ids=tokens, labels=tokens).loss.backward()

    forward_backward = seconds(passes, options.device, options.repeats)
    step = seconds(optimizer.step, options.device, options.repeats)
    least = 4 * linear_parameters(shape) * options.tokens / limit
    figures: Report = {
        "tokens": options.tokens,
        "forward_backward_s": forward_backward,
        "optim_step_s": step,
        "tokens_per_s": options.tokens / (forward_backward + step),
        "share_of_matmul_limit": least / forward_backward,
        "peak_gib": peak_gib(options.device),
    }
    return measured_again(figures, limit, matmul_limit(options))
