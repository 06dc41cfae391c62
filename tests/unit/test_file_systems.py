"""Finding the file system of a path, and refusing SQLite on one of another machine."""

from pathlib import Path

import pytest

from tinsmith.errors import ConfigError
from tinsmith.host import NETWORK, file_system_of, find_in
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.databases import sqlite
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext

MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
host:/export /home nfs4 rw,vers=4.2 0 0
/dev/vdb /home/local xfs rw 0 0
systemd-1 /mnt/auto autofs rw 0 0
host:/more /mnt/auto nfs rw 0 0
me@host: /mnt/with\\040space\\134 fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib", "ext4"),
        ("/home/me/.tinsmith", "nfs4"),
        ("/homes", "ext4"),
        ("/home/local/data", "xfs"),
        ("/mnt/auto/data", "nfs"),  # the later mount hides the earlier
        ("/mnt/with space\\/data", "fuse.sshfs"),
    ],
)
def test_the_longest_mount_point_decides_and_the_last_of_several(path: str, kind: str) -> None:
    assert find_in(MOUNTS, Path(path)) == kind


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/self")
    assert file_system_of(tmp_path / "link") == "proc"
    assert file_system_of(tmp_path) not in NETWORK


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "fuse.sshfs"])
async def test_sqlite_is_refused_on_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(sqlite, "file_system_of", lambda _: kind)
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=tmp_path / "data"))
    with pytest.raises(ConfigError, match=rf"network file system \({kind}\).*local disk.*PostgreSQL"):
        await store.open()
    assert list((tmp_path / "data").iterdir()) == []


async def test_sqlite_is_opened_where_the_system_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "file_system_of", lambda _: None)
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=tmp_path))
    await store.open()
    await store.close()
