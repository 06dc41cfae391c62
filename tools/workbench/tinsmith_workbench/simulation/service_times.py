"""The time that each step of a request takes, as a file: `benchmarks/service_times.py` measures one.

All times are in seconds of an otherwise idle machine.
"""

from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from tinsmith.errors import ConfigError

DEFAULT: Final = Path(__file__).with_name("service_times.json")


class FromFile(BaseModel):
    """Base class of everything that a simulation reads from a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Backend(FromFile):
    """The limits of one engine's backend: its capabilities."""

    max_batch_tokens: PositiveInt
    max_context_tokens: PositiveInt
    max_sequences: PositiveInt
    max_models: PositiveInt
    model_bytes: PositiveInt = Field(
        description="of a model's training state on the device: weights, moments, gradients"
    )
    beside: float = Field(
        ge=0.5,
        le=1.0,
        description="speed of training and of sampling while both run, against alone: 0.5 if they share one device, "
        "1 if each has its own",
    )


class Server(FromFile):
    """The processor time of a server process. It handles one thing at a time."""

    submit_s: NonNegativeFloat = Field(description="to receive, parse and check an operation")
    answer_s: NonNegativeFloat = Field(description="to answer the poll for a result")


class Transaction(FromFile):
    """`fixed_s` for the transaction, and `operation_s` for each operation in it."""

    fixed_s: NonNegativeFloat
    operation_s: NonNegativeFloat

    def seconds(self, operations: int) -> float:
        return self.fixed_s + self.operation_s * operations


class Store(FromFile):
    """Durable transactions. SQLite has one writer."""

    submit: Transaction
    claim: Transaction
    record: Transaction
    writers: PositiveInt = Field(1, description="transactions at a time")


class Training(FromFile):
    """Calls of the backend."""

    batch_s: NonNegativeFloat
    operation_s: NonNegativeFloat
    token_s: PositiveFloat
    optim_batch_s: NonNegativeFloat
    optim_operation_s: NonNegativeFloat
    save_s: NonNegativeFloat = Field(description="a save for sampling; it holds up only its own model")


class Sampling(FromFile):
    """A step draws one token for each row. Prompts are read one after the other, and the rows wait meanwhile."""

    step_s: NonNegativeFloat
    row_s: PositiveFloat
    prompt_s: NonNegativeFloat
    prompt_token_s: NonNegativeFloat


class ServiceTimes(FromFile):
    measured: str = Field(description="what was measured, how, and on what")
    backend: Backend
    server: Server
    store: Store
    engine: Transaction = Field(
        description="of the engine's process, for each claim and each record, while the device stands still; 0 if it "
        "goes on"
    )
    training: Training
    sampling: Sampling

    @classmethod
    def read(cls, path: Path = DEFAULT) -> "ServiceTimes":
        """Raise ConfigError if the file does not hold service times."""
        return read_part(cls, path)


P = TypeVar("P", bound=FromFile)


def read_part(kind: type[P], path: Path) -> P:
    """Read one object of a kind from a JSON file. Raise ConfigError if that fails."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        msg = f"{str(path)!r} does not hold {kind.__name__}: {error}"
        raise ConfigError(msg) from error
