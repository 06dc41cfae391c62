"""Which file system holds a path, and whether it belongs to another machine."""

import re
from pathlib import Path
from typing import Final

NETWORK: Final = frozenset(
    {
        *("afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"),
        *("orangefs", "panfs", "pvfs2", "smb3", "smbfs", "vboxsf", "wekafs"),
        *("fuse.afp", "fuse.blobfuse", "fuse.blobfuse2", "fuse.ceph", "fuse.ceph-fuse", "fuse.davfs", "fuse.gcsfuse"),
        *("fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.mount-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
        *("fuse.vmhgfs-fuse",),
    }
)
"""Types of file systems on other machines, as Linux names them."""

_MOUNTS: Final = Path("/proc/self/mounts")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


def file_system_of(path: Path) -> str | None:
    """Return the type of the file system that holds a path; None if the system does not say (other than Linux)."""
    if not _MOUNTS.exists():
        return None
    return find_in(_MOUNTS.read_text(encoding="utf-8", errors="surrogateescape"), path.resolve())


def find_in(mounts: str, path: Path) -> str | None:
    """Return the type of the mount that holds an absolute path: the longest mount point, and the last of several."""
    found: tuple[int, str] | None = None
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), point)
        if path.is_relative_to(point) and (found is None or len(point) >= found[0]):
            found = len(point), kind
    return None if found is None else found[1]
