"""A folder that is made once and then kept: complete or absent, checked at every use.

It is made beside its place and renamed into it, under a lock, so that a process that dies half-way
leaves nothing behind that looks finished, and of two processes one makes it while the other waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

MANIFEST = "specdec-manifest.json"


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return `folder`, made by `make(empty_folder)` unless an intact one is there already.

    Raises `OSError` when there is no room or no permission, and whatever `make` raises; nothing
    unfinished stays behind then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if is_intact(folder):  # made by another process while this one waited
            return folder
        for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
            shutil.rmtree(leftover)  # of a process that died: whoever lives holds the lock
        work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
        try:
            make(work)
            _write_manifest(work)
            if folder.exists():
                folder.rename(work.with_name(f"{work.name}-damaged"))
            work.rename(folder)
        finally:
            for leftover in folder.parent.glob(f"{work.name}*"):
                shutil.rmtree(leftover)
    return folder


def is_intact(folder: Path) -> bool:
    """Whether every file is as it was written.

    Sizes and times are compared, and the contents of a file only when its time is another: hashing
    all of a model at each start would take longer than loading it.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        return bool(manifest) and all(
            _is_unchanged(folder / name, entry) for name, entry in manifest.items()
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False  # no folder, no manifest, a missing file, or a manifest that makes no sense


def _is_unchanged(path: Path, entry: dict[str, Any]) -> bool:
    stat = path.stat()
    if stat.st_size != entry["size"]:
        return False
    if stat.st_mtime_ns == entry["mtime_ns"]:
        return True
    if sha256(path) != entry["sha256"]:
        return False
    # A copied cache: the contents are right, so the next start need not read them again.
    with contextlib.suppress(OSError):  # a cache that this user may only read
        os.utime(path, ns=(stat.st_atime_ns, entry["mtime_ns"]))
    return True


def _write_manifest(folder: Path) -> None:
    manifest = {}
    for path in sorted(folder.iterdir()):
        stat = path.stat()
        manifest[path.name] = {
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "sha256": sha256(path),
        }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
