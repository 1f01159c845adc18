"""Access to a run's files: a folder, or `s3://…` read by ranges. Read only.

Files appear complete and disappear only when a resumed run repeats steps: name, size and time identify a content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.fs as pafs

from rayapp.core.errors import InputError, StorageUnreachableError
from rayapp.core.files import Location
from rayapp.runs.folder import FORMAT_FILE, check_format_text
from rayapp.runs.layout import EVALUATIONS, PARQUET, TRAJECTORIES, step_of
from rayapp.storage.settings import settings_from_environment

Purpose = Literal["train", "eval"]
FOLDERS: Mapping[Purpose, str] = {"train": TRAJECTORIES, "eval": EVALUATIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    step: int
    path: str
    stamp: tuple[int, int]  # bytes, and time of change in ns: another stamp is another content
    purpose: Purpose = "train"  # eval: an evaluation after that step


class RunSource:
    """The files of a run: the folder `root` in one of pyarrow's file systems."""

    def __init__(self, files: Any, root: str, name: str) -> None:
        self.files = files
        self.root = root.rstrip("/")
        self.name = name

    def step_files(self) -> list[StepFile]:
        """Return trajectory files, including evaluations, newest step first. Empty if the run records none."""
        files = [
            StepFile(step=step, path=info.path, stamp=(info.size, info.mtime_ns or 0), purpose=purpose)
            for purpose, folder in FOLDERS.items()
            for info in self._list(f"{self.root}/{folder}")
            if (step := step_of(info.base_name)) is not None and info.base_name.endswith(PARQUET)
        ]
        return sorted(files, key=lambda file: -file.step)

    def read_bytes(self, name: str, *, offset: int = 0) -> bytes | None:
        """Return a small file of the run from `offset` on; None if there is no such file."""
        try:
            with self.files.open_input_file(f"{self.root}/{name}") as file:
                size = file.size()
                return bytes(file.read_at(size - offset, offset)) if size > offset else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageUnreachableError(f"{self.root}/{name} can't be read: {error}") from None

    def stamp(self, name: str) -> tuple[int, int] | None:
        """Return size in bytes and time of change in ns; None if there is no such file."""
        info = self._info(f"{self.root}/{name}")
        return (info.size, info.mtime_ns or 0) if info.type == pafs.FileType.File else None

    def _info(self, path: str) -> Any:
        try:
            return self.files.get_file_info(path)
        except OSError as error:
            raise StorageUnreachableError(f"{path} can't be read: {error}") from None

    def _list(self, folder: str) -> list[Any]:
        try:
            return list(self.files.get_file_info(pafs.FileSelector(folder, allow_not_found=True)))
        except OSError as error:
            raise StorageUnreachableError(f"{folder} can't be listed: {error}") from None


MOST_RUNS = 30  # of a folder: those written last are shown


def run_uris(uri: str) -> list[str]:
    """Return the run at `uri`, or the runs in a folder of runs, last written first. `open_source` reports errors."""
    location = Location.parse(uri)
    folder = Path(location.key).expanduser()
    if location.is_remote or _is_run(folder) or not folder.is_dir():
        return [uri]
    runs = sorted(filter(_is_run, folder.iterdir()), key=lambda run: -run.stat().st_mtime)
    return [str(run) for run in runs[:MOST_RUNS]] or [uri]


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl", *FOLDERS.values()))


def open_source(uri: str) -> RunSource:
    """Open the run at a path or `s3://bucket/prefix`. RunFolderError: a newer version wrote it."""
    location = Location.parse(uri)
    if location.is_remote:
        source = RunSource(_s3(), f"{location.bucket}/{location.key}", Path(location.key).name or location.bucket)
    else:
        path = Path(location.key).expanduser().resolve()
        source = RunSource(pafs.LocalFileSystem(), str(path), path.name)
    if source.stamp("config.yaml") is None and source.stamp("metrics.jsonl") is None and not source.step_files():
        raise InputError(
            f"{uri} is not a run folder: it has neither config.yaml nor metrics.jsonl nor trajectories/. "
            "Give the folder of a run, e.g. outputs/coding_cpu, or a folder of runs, e.g. outputs"
        )
    version = source.read_bytes(FORMAT_FILE)
    if version is not None:
        check_format_text(version, uri)
    return source


def _s3() -> Any:
    settings = settings_from_environment()
    options: dict[str, Any] = {
        "access_key": settings.access_key_id,
        "secret_key": settings.secret_access_key,
        "session_token": settings.session_token,
        "region": settings.region,
        "endpoint_override": settings.endpoint_url,
        "force_virtual_addressing": settings.addressing_style == "virtual",
        "connect_timeout": settings.transfer.connect_timeout_s,
        "request_timeout": settings.transfer.read_timeout_s,
    }
    return pafs.S3FileSystem(**{key: value for key, value in options.items() if value is not None})
