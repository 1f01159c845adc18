"""Which start of a process this is. Ray starts an actor again behind the same handle; this tells the two apart."""

from __future__ import annotations

import uuid

INCARNATION = uuid.uuid4().hex
"""Of this process: each Ray actor has its own."""
