"""Settings of S3-compatible storage. They are read only from environment variables, because config files hold no
secrets.

    RAYAPP_S3_PRESET    aws (default) | minio | oss
    AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION or AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_SESSION_TOKEN   as every AWS tool reads them (with aws also profiles and instance roles)
    OSS_REGION, OSS_ENDPOINT, OSS_ACCESS_KEY_ID, OSS_ACCESS_KEY_SECRET, OSS_SESSION_TOKEN   with oss

A preset holds the differences between the services; `S3Settings` is the result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rayapp.core.errors import StorageConfigError, StorageCredentialsError

PRESETS = ("aws", "minio", "oss")
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Sizes, timeouts and retries of transfers. A storage sends or fetches two large files at a time."""

    # Larger for files of more than 10,000 parts; S3 refuses less than 5 MiB, except for the last. With 8 MiB an upload
    # takes a fifth more time.
    part_bytes: int = 16 * MIB
    num_parallel: int = 4  # parts of one file in memory at once
    max_attempts: int = 6
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    endpoint_url: str | None = None
    region: str | None = None
    access_key_id: str | None = None  # None: the client looks for a profile or an instance role, as AWS tools do
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    addressing_style: str = "auto"
    signature_version: str = "s3v4"
    # Value of botocore for requests; `when_required` for services that can't read chunked bodies with a checksum.
    checksums: str = "when_supported"
    transfer: Transfer = field(default_factory=Transfer)


def settings_from_environment(environment: Mapping[str, str] | None = None) -> S3Settings:
    env = os.environ if environment is None else environment
    preset = env.get("RAYAPP_S3_PRESET", "aws").lower()
    builders = {"aws": _aws, "minio": _minio, "oss": _oss}
    if preset not in builders:
        raise StorageConfigError(f"RAYAPP_S3_PRESET={preset!r} is not a preset: use one of {', '.join(PRESETS)}")
    return builders[preset](env)


def _aws(env: Mapping[str, str]) -> S3Settings:
    key_id, secret, token = _aws_keys(env)
    return S3Settings(
        endpoint_url=_endpoint(env),
        region=_region(env),
        access_key_id=key_id,
        secret_access_key=secret,
        session_token=token,
    )


def _minio(env: Mapping[str, str]) -> S3Settings:
    if _endpoint(env) is None:
        raise StorageConfigError("RAYAPP_S3_PRESET=minio needs AWS_ENDPOINT_URL, e.g. http://minio:9000")
    own = _aws(env)
    # By default MinIO has this region, and no DNS name for each bucket.
    return replace(own, region=own.region or "us-east-1", addressing_style="path")


def _oss(env: Mapping[str, str]) -> S3Settings:
    region = env.get("OSS_REGION", "").removeprefix("oss-")
    endpoint = env.get("OSS_ENDPOINT") or _endpoint(env) or (f"https://s3.oss-{region}.aliyuncs.com" if region else "")
    if not endpoint:
        raise StorageConfigError("RAYAPP_S3_PRESET=oss needs OSS_REGION, e.g. cn-beijing, or OSS_ENDPOINT")
    names = ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET", "OSS_SESSION_TOKEN")
    key_id, secret, token = _pair(env, *names) if env.get(names[0]) or env.get(names[1]) else _aws_keys(env)
    return S3Settings(
        endpoint_url=endpoint if "://" in endpoint else f"https://{endpoint}",
        region=region or _region(env),
        access_key_id=key_id,
        secret_access_key=secret,
        session_token=token,
        # OSS serves only virtual-hosted names. It can't read aws-chunked bodies, which signature V4 with checksums
        # would send.
        addressing_style="virtual",
        signature_version="s3",
        checksums="when_required",
    )


def _aws_keys(env: Mapping[str, str]) -> tuple[str | None, str | None, str | None]:
    return _pair(env, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def _pair(env: Mapping[str, str], key: str, secret: str, token: str) -> tuple[str | None, str | None, str | None]:
    if bool(env.get(key)) != bool(env.get(secret)):
        missing, there = (secret, key) if env.get(key) else (key, secret)
        raise StorageCredentialsError(f"{there} is set but {missing} is not: set both, or neither")
    return env.get(key) or None, env.get(secret) or None, env.get(token) or None


def _endpoint(env: Mapping[str, str]) -> str | None:
    return env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or None


def _region(env: Mapping[str, str]) -> str | None:
    return env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or None
