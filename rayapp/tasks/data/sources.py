"""Raw data sets by `datasets`: from the hub, or a local folder or file. Called by `preparing.py`.

A local source is a folder that `save_to_disk` wrote, a folder with train.* and test.* as parquet, JSONL, JSON or CSV,
or one such file, which is one split, `train` unless the data set has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayapp.core.errors import InputError

SPLITS = ("train", "test")
_LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".gz": "json", ".csv": "csv"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def load_splits(
    source: str, *, hub_configuration: str | None, revision: str = "", file_split: str = "train", cache: Path
) -> Mapping[str, Any]:
    """The splits of `source` as `datasets.Dataset`, images left encoded.

    Args:
        source: a path or a hub id.
        revision: revision of the hub's repository; empty is its newest.
        file_split: name of the split that a source of one file is.
        cache: folder for what `datasets` converts from local files.
    Raises:
        InputError: it can't be found, reached or read.
    """
    path = Path(source).expanduser()
    if not path.exists() and not _HUB_ID.fullmatch(source):
        raise InputError(f"source {source!r} is neither a path on this machine nor a hub id like owner/name")
    if path.exists() and revision:
        raise InputError(f"source {source!r} is on this machine, and --revision {revision} is for a source on the hub")
    try:
        loaded = (
            _load_local(path, file_split, cache) if path.exists() else _load_hub(source, hub_configuration, revision)
        )
    except InputError:
        raise
    except Exception as error:  # boundary: `datasets` raises whatever its readers do
        advice = "Is the file whole?" if path.exists() else "Without a network, give a local folder (docs/data.md)."
        raise InputError(
            f"source {source!r} can't be read: {type(error).__name__}: {_first(error)}. {advice}"
        ) from error
    return {name: _without_decoding(split) for name, split in loaded.items()}


def _load_hub(source: str, configuration: str | None, revision: str) -> Mapping[str, Any]:
    from datasets import load_dataset

    loaded: Mapping[str, Any] = load_dataset(source, configuration, revision=revision or None)
    return {name: loaded[name] for name in SPLITS if name in loaded}


def _load_local(path: Path, file_split: str, cache: Path) -> Mapping[str, Any]:
    if path.is_file():
        return {file_split: _load_file(path, cache)}
    if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        return _load_saved(path)
    files = {name: file for name in SPLITS for file in sorted(path.glob(f"{name}*")) if file.suffix in _LOADERS}
    if not files:
        raise InputError(
            f"source {path}: no train or test file ({', '.join(_LOADERS)}), nothing from save_to_disk either"
        )
    return {name: _load_file(file, cache) for name, file in files.items()}


def _load_saved(path: Path) -> Mapping[str, Any]:
    from datasets import Dataset, load_from_disk

    loaded = load_from_disk(str(path))
    if isinstance(loaded, Dataset):
        return {"train": loaded}
    return {name: loaded[name] for name in SPLITS if name in loaded}


def _load_file(path: Path, cache: Path) -> Any:
    from datasets import load_dataset

    if path.suffix not in _LOADERS:
        raise InputError(f"source {path}: must end in {', '.join(_LOADERS)}")
    return load_dataset(_LOADERS[path.suffix], data_files=str(path), split="train", cache_dir=str(cache))


def _without_decoding(split: Any) -> Any:
    """The split with images left as bytes: decoding and encoding them again would cost time and change them."""
    from datasets import Image, Sequence

    for name, feature in split.features.items():
        if isinstance(feature, Image):
            split = split.cast_column(name, Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), Image):
            split = split.cast_column(name, Sequence(Image(decode=False)))
    return split


def _first(error: Exception) -> str:
    # `datasets` wraps the reader's error, which is the one that says what is wrong.
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:300]
