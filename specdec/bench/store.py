"""The run folder: what was measured, by what, on what; written as it comes, and never mixed.

`config.yaml` is the expanded grid, `machine.json` the machine and the versions, `results.jsonl` one
line a question and row, `summary.json` the figures, `examples.json` some answers with their drafts.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

import specdec
from specdec.errors import SpecdecError
from specdec.plugins import registry
from specdec.training.files import read_json, read_jsonl, write_atomically

PACKAGES = ("torch", "transformers", "accelerate")
CODE = (".py", ".jsonl", ".html", ".css")


class RunFolder:
    """One run's files.

    Args:
        path: the folder; made when it is not there.
        record: the configuration, as `BenchConfig.record` gives it.
        weights: a fingerprint of the weights in use.
    """

    def __init__(self, path: Path, record: dict[str, Any], weights: str) -> None:
        self.path = path
        self.record, self.machine = record, {**describe_machine(), "weights": weights}

    @property
    def results_path(self) -> Path:
        return self.path / "results.jsonl"

    def claim(self) -> None:
        """Make the folder this run's own, or go on with it where it is this run's already.

        Raises:
            SpecdecError: it belongs to another configuration, code, machine or other weights.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        config, machine = self.path / "config.yaml", self.path / "machine.json"
        if config.exists() and machine.exists():
            self._check_same(yaml.safe_load(config.read_text(encoding="utf-8")), read_json(machine))
        elif self.results_path.exists():
            raise SpecdecError(
                f"{self.path} has results but no config.yaml and machine.json; use another folder."
            )
        else:
            write_atomically(
                config, yaml.safe_dump(self.record, sort_keys=False, allow_unicode=True)
            )
            write_atomically(machine, json.dumps(self.machine, indent=1))
        self._drop_partial_line()

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Add results: all of `lines` or, after a kill, none of them."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        # One write to a file opened for appending: several processes may share it.
        handle = os.open(self.results_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, text.encode())
            os.fsync(handle)
        except OSError as error:
            raise SpecdecError(f"cannot write {self.results_path}: {error.strerror}") from error
        finally:
            os.close(handle)

    def results(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.results_path)) if self.results_path.exists() else []

    def write(self, name: str, content: Any) -> None:
        write_atomically(self.path / name, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def _check_same(self, config: Any, machine: dict[str, Any]) -> None:
        differing = [key for key in self.record if config.get(key) != self.record[key]]
        fixed = ("code", "weights", "versions", "processor", "devices", "threads")
        differing += [key for key in fixed if machine.get(key) != self.machine[key]]
        if differing:
            raise SpecdecError(
                f"{self.path} was made with another configuration, code or machine (other: "
                f"{', '.join(differing)}); results are never mixed. Use another folder (--out)."
            )

    def _drop_partial_line(self) -> None:
        """A kill may have left the beginning of a line at the end."""
        if not self.results_path.exists():
            return
        content = self.results_path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with self.results_path.open("r+b") as file:
                file.truncate(whole)


def describe_machine() -> dict[str, Any]:
    """What the figures depend on: processor, devices, versions, a hash of the code."""
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory_gb(),
        "devices": devices,
        "system": f"{platform.system()} {platform.release()}",
        "versions": {
            "specdec": specdec.__version__,
            "python": platform.python_version(),
            **versions,
        },
        "code": code_hash(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def code_hash() -> str:
    """A hash of specdec's own files and of all plugins', the version of the code that measured."""
    digest = hashlib.sha256()
    for root in [Path(specdec.__file__).parent, *registry().sources()]:
        files = sorted(root.rglob("*")) if root.is_dir() else [root]
        for path in files:
            if path.suffix in CODE and path.is_file():
                digest.update(str(path.relative_to(root.parent)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def folder_fingerprint(folder: Path) -> str:
    """A hash of a checkpoint's files: names, sizes, and the ends of each (weights can be huge)."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(2**20))
            file.seek(max(0, path.stat().st_size - 2**20))
            digest.update(file.read())
    return digest.hexdigest()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
