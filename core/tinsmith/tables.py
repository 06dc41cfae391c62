"""For packages that keep something in the request store: tables of their own beside the log's, and their statements.

A package declares its tables, offers them with the hook `tinsmith_register_tables`, and reads and changes them with
`RequestStore.read` and `RequestStore.write`.
"""

from tinsmith.sql_store.columns import TableBase, id_of_run, id_of_session, int64, named_metadata
from tinsmith.sql_store.group_commit import locks
from tinsmith.sql_store.statements import Change, Query, fields_of, insert_into, query, total, values_of, wanted
from tinsmith.sql_store.subjects.audit import note_audit
from tinsmith.sql_store.subjects.models import tenant_of_run
from tinsmith.sql_store.transaction import Sums, Transaction
from tinsmith.store import Completed, Tables, TablesSpec

__all__ = [
    "Change",
    "Completed",
    "Query",
    "Sums",
    "TableBase",
    "Tables",
    "TablesSpec",
    "Transaction",
    "fields_of",
    "id_of_run",
    "id_of_session",
    "insert_into",
    "int64",
    "locks",
    "named_metadata",
    "note_audit",
    "query",
    "tenant_of_run",
    "total",
    "values_of",
    "wanted",
]
