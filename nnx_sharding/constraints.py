"""The names of ``eformer.escale.partition.constraints``; implemented in ``compat.eformer``."""

from .compat.eformer import *  # noqa: F403
from .compat.eformer import __all__ as __all__
