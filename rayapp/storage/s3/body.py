"""What one request sends, and the checksum that lets the server refuse it when it is damaged. For
`rayapp.storage.s3.storage`.

Given by us, a CRC is computed in a thread, and the body goes as it is. The client would compute it on the event loop,
and over TLS wrap the body in chunks to append it, which not every service reads.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zlib


class Body(io.BytesIO):
    """Bytes as a request body. Its buffer is the bytes themselves: that of BytesIO would be a copy of them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._data = data

    def getbuffer(self) -> memoryview:
        return memoryview(self._data)


def checksum_arguments(data: bytes, checksums: str) -> dict[str, str]:
    """Arguments of the request; blocks.

    Args:
        checksums: `S3Settings.checksums`.
    """
    if checksums == "when_required":
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        return {"ContentMD5": base64.b64encode(digest).decode()}
    return {"ChecksumCRC32": base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()}
