"""Scale on paper: the production scheduler over virtual time, with measured service times.

What decides is real: the scheduler, the shares of a claim (`ClaimRoom`, `Holdings`) and the engine's queues
(`TrainingQueue`, `SampleQueue`). Durations come from a file (`service_times.py`).
docs/explanation/scale.md lists the omissions.
"""
