"""Importing this module puts gloo in NCCL's place: in a learner's process, and in those of an engine whose
`worker_extension_cls` is `support.gloo_for_nccl.GlooExtension`.
"""

from __future__ import annotations

from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

from rayapp.engine.vllm_worker import WeightUpdateExtension
from support.gloo import GlooTrainerWeightTransferEngine, GlooWeightTransferEngine

WeightTransferEngineFactory._registry["nccl"] = lambda: GlooWeightTransferEngine
WeightTransferTrainerFactory._registry["nccl"] = lambda: GlooTrainerWeightTransferEngine


class GlooExtension(WeightUpdateExtension):
    """The product's extension of vLLM's workers."""
