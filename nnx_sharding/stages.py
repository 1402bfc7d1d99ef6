"""The stages of a transformed function: see :mod:`nnx_sharding.lifting.stages`."""

from .lifting.stages import Compiled, Lowered, Stage, Traced

__all__ = ["Compiled", "Lowered", "Stage", "Traced"]
