"""One-line faults of our own server, each with the check that must fail."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    module: str
    line: str  # what the source has, once
    instead: str
    check: str  # by its title


_TRAINING = "tinsmith.builtin.toy_training"

FAULTS = {
    "gradients replace each other": Fault(
        _TRAINING,
        "self.gradients.get(name, 0.0) + gradient",
        "gradient",
        "Two passes before a step add up to one with the data of both",
    ),
    "sequence ids are left out": Fault(
        "tinsmith.server.routes.sampling",
        "for index in range(body.num_samples)]",
        "for index in range(0)]",
        "A call of asample answers with one sequence id for each sample",
    ),
    "an ended session may beat": Fault(
        "tinsmith.server.routes.sessions",
        '    if session.ended is not None:\n        msg = f"session {body.session_id!r} has',
        '    if False:\n        msg = f"session {body.session_id!r} has',
        "The heartbeat of a finished session is answered with 410",
    ),
}
