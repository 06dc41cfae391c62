"""The vLLM sampler: vLLM processes that sample for any trainer."""
