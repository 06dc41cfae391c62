"""The parts of gpu.py. Each is a module with `run(options) -> report`, and runs in a process of its own."""
