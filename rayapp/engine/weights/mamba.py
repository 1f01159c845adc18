"""Mamba's convolutions, of which vLLM 0.30 keeps a view beside the layer that loads them.

On a CPU with AVX512-BF16 that layer's weights are packed elsewhere when they are loaded: the view, which mixers compute
with, is of the old ones, and a reload does not reach it.
"""

from __future__ import annotations

from typing import Any


def copy_convolutions(model: Any) -> None:
    """Give mixers the convolutions of the reload that has just ended; nothing where none is packed."""
    for mixer in model.modules():
        unpacked = getattr(getattr(mixer, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        if unpacked is not None and "conv_weights" in dict(mixer.named_buffers(recurse=False)):
            mixer.conv_weights.copy_(unpacked)
