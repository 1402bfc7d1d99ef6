"""The stages of a transformed function: see :mod:`nnx_sharding.transforms.stages`."""

from .transforms.stages import Compiled, Lowered, Stage, Traced

__all__ = ["Compiled", "Lowered", "Stage", "Traced"]
