"""Locations of what is stored: `s3://bucket/prefix`, `file:///folder` or a plain path, taken apart once and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rayapp.core.errors import StorageConfigError

# Bucket names that S3, OSS and MinIO all accept; a dot is legal, but breaks TLS with virtual-hosted names.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """One folder or object.

    Example: `Location.parse("s3://models/run1")` is `Location(bucket="models", key="run1")`; local: no bucket.
    """

    key: str
    """Key inside the bucket without a slash at either end, or a local path."""
    bucket: str = ""

    @property
    def is_remote(self) -> bool:
        return bool(self.bucket)

    @classmethod
    def parse(cls, uri: str) -> Location:
        """Take a URI or path apart.

        Raises:
            StorageConfigError: another scheme, no bucket, or an impossible bucket name.
        """
        scheme = _SCHEME.match(uri)
        if scheme is None or scheme.group(1).lower() == "file":
            path = uri[len("file://") :] if scheme else uri
            if not path:
                raise StorageConfigError("a storage location is empty; give a folder or s3://bucket/prefix")
            return cls(key=path)
        if scheme.group(1) != "s3":
            raise StorageConfigError(
                f"{uri!r}: only s3://bucket/prefix and local paths are supported. "
                "OSS and MinIO speak S3 too: write s3:// and set RAYAPP_S3_PRESET (see docs/data.md)."
            )
        bucket, _, key = uri[len("s3://") :].partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise StorageConfigError(
                f"{uri!r}: {bucket!r} is no bucket name: 3 to 63 lower-case letters, digits and hyphens"
            )
        return cls(bucket=bucket, key=key.strip("/"))

    def join(self, key: str) -> Location:
        """The object `key` below this folder."""
        if self.is_remote:
            return Location(bucket=self.bucket, key=f"{self.key}/{key}".strip("/"))
        return Location(key=str(Path(self.key) / key))

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}" if self.is_remote else self.key


def check_key(key: str) -> str:
    """`key` if it names an object below a folder: relative, no `..`, no empty part.

    Raises:
        StorageConfigError: it would point out of the folder, or name two things in two kinds of storage.
    """
    parts = key.split("/")
    if not key or "\\" in key or "\0" in key or any(part in {"", ".", ".."} for part in parts):
        raise StorageConfigError(f"{key!r} is no key: give names joined by single slashes, without . and ..")
    return key
