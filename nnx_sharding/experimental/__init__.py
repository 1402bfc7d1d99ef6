"""Parts with a shorter promise than the rest: their names may change in any release.

``ring`` attends over sequences that are sharded over devices, and ``context`` puts that into models
that know nothing of it; ``dispatch`` sends tokens to the devices of their experts, which
``experts`` shards; ``live_models`` copies the weights of one live model into another. Tests compare
each with one device, on virtual CPU devices: none has run on a TPU. There are other libraries for
the same, and kernels for single accelerators are faster.
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
