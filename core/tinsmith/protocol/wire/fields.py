"""The types of fields, and the two kinds of bodies that are read."""

from typing import Annotated, Any, Final

import numpy as np
import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)

from tinsmith.protocol import bounds
from tinsmith_checkpoints.values import Json

SEED_RANGE: Final = 2**63 - 1

JsonMetadata = Annotated[dict[str, Json], BeforeValidator(bounds.metadata)]
TextMetadata = Annotated[dict[str, str], BeforeValidator(bounds.metadata)]
Name = Annotated[str, StringConstraints(max_length=bounds.MAX_NAME_CHARS), AfterValidator(bounds.plain)]
"""An id, a name, a path or the like."""
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Int64 = Annotated[int, Field(ge=0, lt=2**63)]
SeqId = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[
    Annotated[int, Field(ge=-(2**63), lt=2**64)] | None,
    AfterValidator(lambda seed: None if seed in (None, -1) else seed % SEED_RANGE),
]
"""Of 64 bits, folded into what operations hold. None if there is none: clients write null or, as other servers, -1."""
Integers = Annotated[
    np.ndarray[Any, np.dtype[np.int64]],
    PlainValidator(bounds.integers),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}, "maxItems": bounds.MAX_NUMBERS}),
]
"""A list of integers that may be long, as an array."""
Numbers = Annotated[
    np.ndarray[Any, np.dtype[np.float64]],
    PlainValidator(bounds.numbers),
    WithJsonSchema({"type": "array", "items": {"type": "number"}, "maxItems": bounds.MAX_NUMBERS}),
]
Shape = Annotated[list[Int64], Field(max_length=bounds.MAX_DIMENSIONS, fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class ExactBody(Body):
    """Changes numbers, so nothing in it may be without effect. The `type` of a request repeats the endpoint."""

    model_config = ConfigDict(extra="forbid")


class Cursor(BaseModel):
    offset: int
    limit: int
    total_count: int


def as_text(metadata: dict[str, Json] | None) -> dict[str, str] | None:
    """Convert metadata for answers: the API takes any JSON values and returns strings."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else orjson.dumps(value).decode() for key, value in metadata.items()}
