"""How people name a run on the command line: by its id, by how only one id begins, or `last` for the newest."""

from typing import Final

from tinsmith.errors import NotFoundError, UserError
from tinsmith.store import RequestStore

_PAGE: Final = 1000
_NAMED: Final = 3  # in a message


async def find_run(store: RequestStore, text: str) -> str:
    """Return the model_id that is meant.

    Raises NotFoundError if no run is, UserError if several are.
    """
    newest, total = await store.list_runs(None, limit=_PAGE, offset=0)
    ids = [each.model_id for each in newest]
    while len(ids) < total and text != "last":
        more, total = await store.list_runs(None, limit=_PAGE, offset=len(ids))
        if not more:  # some have been deleted meanwhile
            break
        ids += [each.model_id for each in more]
    if text in ids:
        return text
    meant = ids[:1] if text == "last" else [each for each in ids if each.startswith(text)]
    if len(meant) == 1:
        return meant[0]
    if meant:
        msg = f"{len(meant)} runs begin with {text!r}, such as {_listed(meant)}; type more of the id"
        raise UserError(msg)
    there = f"the newest are {_listed(ids)}" if ids else "there are none yet"
    msg = f"no run {text!r}: {there}; `tinsmith runs list` prints all of them"
    raise NotFoundError(msg)


def _listed(ids: list[str]) -> str:
    return ", ".join(map(repr, ids[:_NAMED]))
