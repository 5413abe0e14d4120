"""What to do about an error of the disk, by its errno. Imports neither torch nor deepspeed."""

from __future__ import annotations

import errno
from typing import Final

_RIGHTS: Final = "give this user the right to read and write it (chattr -i, chmod, chown), or use another folder"
_ROOM: Final = "free space on that file system, or use another one"
_REMEDIES: Final = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or use another file system",
    errno.EIO: "the drive, its connection or its file system fails (dmesg says more); go on from a checkpoint on another disk",
    errno.EROFS: "mount that file system for writing (dmesg says whether an error made it read-only), or use another one",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.ENOENT: "nobody but the run may remove its files; go on from the last checkpoint",
    errno.ENODATA: "nobody but the run may write its files; go on from the last checkpoint",
    errno.ENAMETOOLONG: "use a folder with a shorter path",
    errno.EINVAL: "use a local file system that has direct I/O (ext4, xfs)",
    errno.ELOOP: "nobody but the run may put a link where one of its files belongs; go on from the last checkpoint",
    errno.ENOTDIR: "a file or a link is where a folder belongs; remove it, or use another path",
    errno.ESTALE: "its run has ended, or the server that has it lost it; start a new run",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def remedy(number: int | None) -> str:
    """What the user can do, as the end of a message."""
    return _REMEDIES.get(number or 0, "dmesg may say more; go on from the last checkpoint")
