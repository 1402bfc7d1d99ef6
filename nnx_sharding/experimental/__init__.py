"""Parts with a shorter promise than the rest: their names may change in any release.

``ring`` attends over sequences that are sharded over devices, and ``context`` puts that into models
that know nothing of it; ``experts`` sends tokens to the devices of their experts; ``transfer``
copies the weights of one live model into another. Each is exact and tested, but there are other
libraries for the same, kernels for single accelerators are faster, and none has run on a TPU.
"""

from .context import context_parallel
from .dispatch import ExpertStatistics, dispatch_to_experts
from .experts import expert_parallel
from .live_models import transfer
from .ring import balanced_order, ring_attention

__all__ = [
    "ExpertStatistics",
    "balanced_order",
    "context_parallel",
    "dispatch_to_experts",
    "expert_parallel",
    "ring_attention",
    "transfer",
]
