"""The same sequences through vLLM alone: its own loop, no adapter, one seed for all."""

import tempfile
from pathlib import Path

from gpu_parts.common import Options, Report, needs, seconds
from gpu_parts.sampling import least_seconds, new_tokens, prompts, sequences


def run(options: Options) -> Report:
    needs("vllm")
    import vllm

    with tempfile.TemporaryDirectory() as directory:
        shape = options.write_model(Path(directory))
        engine = vllm.LLM(
            directory,
            dtype=str(options.dtype).removeprefix("torch."),
            max_model_len=256 if options.toy else 2048,
            max_num_seqs=sequences(options),
            enforce_eager=options.toy,
            load_format="auto" if options.toy else "dummy",
            kv_cache_memory_bytes=1 << 28 if options.toy else None,
        )
        asked = [{"prompt_token_ids": each.tolist()} for each in prompts(options, shape.vocab_size)]
        steps = new_tokens(options)
        params = vllm.SamplingParams(max_tokens=steps, temperature=1.0, ignore_eos=True)
        took = seconds(lambda: engine.generate(asked, params, use_tqdm=False), options.device, options.repeats)
    return {
        "sequences": len(asked),
        "new_tokens_each": steps,
        "s": took,
        "tokens_per_s": len(asked) * steps / took,
        "share_of_bandwidth_limit": least_seconds(options, shape) / took,
    }
