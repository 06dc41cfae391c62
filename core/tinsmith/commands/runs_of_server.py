"""What `tinsmith runs` asks of a running server: the same values as it reads in a data directory."""

from typing import Final, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from tinsmith.commands.client import get_json
from tinsmith.commands.open_store import run_meant
from tinsmith.errors import UserError
from tinsmith.protocol import wire

_PAGE: Final = 500  # runs of one answer
_MOST_OPERATIONS: Final = 200  # of one answer

M = TypeVar("M", bound=BaseModel)


class RunsOfServer:
    """The runs that a key may read. All methods raise UserError if the server cannot be reached, or refuses."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key

    def list(self, tenant: str | None, *, limit: int, offset: int) -> wire.RunSummaries:
        if tenant is not None:
            msg = "--tenant is for a data directory; a server lists the runs of the key's tenant, or all of them"
            raise UserError(msg)
        found = self._page(min(limit, _PAGE), offset)
        while len(found.runs) < limit:
            more = self._page(min(limit - len(found.runs), _PAGE), offset + len(found.runs))
            if not more.runs:
                break
            found.runs += more.runs
        return found.model_copy(update={"cursor": found.cursor.model_copy(update={"limit": limit})})

    def show(self, run: str, *, from_seq_id: int | None, limit: int) -> wire.RunReport:
        if limit > _MOST_OPERATIONS:
            msg = f"--limit is {limit}; a server sends at most {_MOST_OPERATIONS} operations at a time: pass --from"
            raise UserError(msg)
        query = {"limit": limit} if from_seq_id is None else {"limit": limit, "from_seq_id": from_seq_id}
        return self._get(wire.RunReport, f"/runs/{quote(self._find(run))}/log?{urlencode(query)}")

    def _find(self, run: str) -> str:
        found = self.list(None, limit=1 if run == "last" else 1_000_000, offset=0)
        return run_meant([each.run_id for each in found.runs], run)

    def _page(self, limit: int, offset: int) -> wire.RunSummaries:
        return self._get(wire.RunSummaries, f"/runs?{urlencode({'limit': limit, 'offset': offset})}")

    def _get(self, model: type[M], path: str) -> M:
        answer = get_json(self._url, f"/api/v1{path}", self._key)
        try:
            return model.model_validate(answer)
        except ValidationError as error:
            msg = (
                f"{self._url} is no tinsmith server of this version: {error.error_count()} fields of {path} do not fit"
            )
            raise UserError(msg) from error
