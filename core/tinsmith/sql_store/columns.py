"""How tables are declared: the base of their classes, the types of their columns, and who owns their rows."""

import re
from typing import Any, Final

from sqlalchemy import JSON, BigInteger, Column, Integer, MetaData
from sqlalchemy.orm import declared_attr
from sqlmodel import Field, SQLModel

BigKey: Final = BigInteger().with_variant(Integer(), "sqlite")  # SQLite generates only INTEGER keys
TableField = Any  # as sqlmodel.Field itself

OWNER: Final = "tinsmith_owner"
"""Key in the `info` of a column: the table whose row takes this table's rows along when it is deleted."""


def int64(*, index: bool = False, nullable: bool = False) -> TableField:
    return Field(sa_type=BigInteger, index=index, nullable=nullable)


def json_value(*, nullable: bool = False) -> TableField:
    return Field(sa_column=Column(JSON, nullable=nullable))


def key_part() -> TableField:
    return Field(sa_column=Column(BigInteger, primary_key=True, autoincrement=False))


def id_of_run(*, primary_key: bool = False) -> TableField:
    """The `model_id` of the run that owns the row: deleting the run deletes the row."""
    return Field(primary_key=primary_key, index=not primary_key, sa_column_kwargs={"info": {OWNER: "runs"}})


def id_of_session(*, primary_key: bool = False) -> TableField:
    """The `session_id` of the session that owns the row: deleting the session deletes the row."""
    return Field(primary_key=primary_key, index=not primary_key, sa_column_kwargs={"info": {OWNER: "sessions"}})


def named_metadata() -> MetaData:
    """Return metadata that names all constraints, so that migrations can change them."""
    return MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        }
    )


class TableBase(SQLModel):
    """Names each table as its class. A package derives a base of its own, with `metadata = named_metadata()`."""

    @declared_attr.directive
    @classmethod
    def __tablename__(cls) -> str:
        return re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()
