"""Where a checkpoint is built: a hidden folder beside its place, which is its writer's alone.

Two runs may write into one folder at the same time, and a run may die while it writes. A locked file tells the one
from the other, since the system lets go of a dead process's locks: a folder whose lock is held is left alone, one
whose lock is free was left by a dead run and is removed, as is a lock that nobody holds.

.step-00000500.partial        the folder
.step-00000500.partial.lock   its lock, an empty file
.step-00000500.old            a checkpoint of the same name, for the moment in which the new one takes its place
"""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

# Descriptors of the locks that this process holds, by the checkpoint's path; None where the file system has no locks.
_held: dict[Path, int | None] = {}

PART = re.compile(r"model\.safetensors|training\.pt|rank-\d+\.pt|manifest\.json")
"""The names of a checkpoint's files."""

# How often, and how many seconds apart, a lock is asked for: another process may hold it only to see if its owner is dead.
_TRIES, _APART = 20, 0.005


def staging_of(path: Path) -> Path:
    """The folder in which the checkpoint `path` is built."""
    return path.parent / f".{path.name}.partial"


def old_of(path: Path) -> Path:
    """Where a checkpoint waits while the one that replaces it is put into its place."""
    return path.parent / f".{path.name}.old"


def put_back(path: Path) -> None:
    """Put a checkpoint back that a dead run was about to replace; where the new one is in its place, remove it."""
    old = old_of(path)
    if path.absolute() in _held or not old.is_dir() or not _holds_only_parts(old):
        return
    try:
        lock = _lock(path)
    except OSError:  # not ours to change
        return
    if lock is None:
        return
    try:
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(path)
    except OSError:  # another process was faster
        pass
    finally:
        _unlock(path, lock)


def put_back_all(folder: Path) -> None:
    """As `put_back`, for every checkpoint of a folder."""
    for old in folder.glob(".*.old"):
        put_back(old.with_name(old.name[1:].removesuffix(".old")))


def _holds_only_parts(folder: Path) -> bool:
    return all(PART.fullmatch(entry.name) for entry in folder.iterdir())


def claim(path: Path) -> bool:
    """Take a checkpoint's staging folder for this process, until `release`.

    Returns:
        False: another process is writing this very checkpoint.
    """
    path = path.absolute()
    if path in _held:
        return True
    try:
        put_back(path)
        os.makedirs(path.parent, exist_ok=True)
        lock = _lock(path)
        for _ in range(_TRIES):
            if lock is not None:
                break
            time.sleep(_APART)
            lock = _lock(path)
    except OSError:  # no locks there, or no permission, which whoever writes will be told
        _held[path] = None
        return True
    if lock is None:
        return False
    _held[path] = lock
    return True


def claim_new(path: Path) -> bool:
    """As `claim`, but False also where there is something at `path` already."""
    if os.path.exists(path) or not claim(path):  # unlike Path.exists, it does not raise without permission
        return False
    if os.path.exists(path):  # another run was faster, and is done
        release(path)
        return False
    return True


def release(path: Path) -> None:
    """Let go of what `claim` took, and remove what is left in the staging folder."""
    path = path.absolute()
    if path not in _held:
        return
    shutil.rmtree(staging_of(path), ignore_errors=True)
    _unlock(path, _held.pop(path))


def sweep(folder: Path) -> None:
    """Remove what dead runs left in a folder of checkpoints, and put back what they were about to replace."""
    folder = folder.absolute()
    for path in _begun_in(folder):
        _remove_if_left(path)
    put_back_all(folder)


def _begun_in(folder: Path) -> set[Path]:
    """The checkpoints of a folder of which there is a staging folder or a lock."""
    entries = (*folder.glob(".*.partial"), *folder.glob(".*.partial.lock"))
    names = (entry.name[1:].removesuffix(".lock").removesuffix(".partial") for entry in entries)
    return {folder / name for name in names}


def _remove_if_left(path: Path) -> None:
    """Remove staging folder and lock if no living process holds them, and they hold nothing that is not ours."""
    staging, lock_file = staging_of(path), _lock_file(path)
    try:
        if path in _held or (staging.exists() and not _holds_only_parts(staging)):
            return
        if lock_file.exists() and lock_file.stat().st_size > 0:
            return
        lock = _lock(path)
    except OSError:  # no folder, or just gone
        return
    if lock is not None:
        shutil.rmtree(staging, ignore_errors=True)
        _unlock(path, lock)


def _lock(path: Path) -> int | None:
    """The descriptor of the lock; None: another process holds it.

    Raises:
        OSError: this file system has no locks, or the file can't be made.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError("this system has no file locks") from None
    name = _lock_file(path)
    while True:
        descriptor = os.open(name, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(name) and os.path.samestat(os.fstat(descriptor), os.stat(name)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the holder before removed it between our two calls


def _unlock(path: Path, lock: int | None) -> None:
    if lock is not None:
        _lock_file(path).unlink(missing_ok=True)
        os.close(lock)


def _lock_file(path: Path) -> Path:
    return path.parent / f".{path.name}.partial.lock"
