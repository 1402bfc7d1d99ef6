"""Parts with a shorter promise than the rest: their names may change in any release.

``ring``, ``all_to_all`` and ``all_gather`` attend over sequences that are sharded over devices, and
``context`` puts that into models that know nothing of it; ``dispatch`` sends tokens to the devices
of their experts, which ``experts`` shards; ``live_models`` copies the weights of one live model
into another. Tests compare each with one device, on virtual CPU devices: none has run on a TPU.
There are other libraries for the same, and kernels for single accelerators are faster.
"""

from .all_gather import all_gather_attention
from .all_to_all import all_to_all_attention
from .context import context_parallel
from .dispatch import ExpertStatistics, dispatch_to_experts
from .experts import expert_parallel
from .layout import balanced_order
from .live_models import transfer
from .ring import ring_attention

__all__ = [
    "ExpertStatistics",
    "all_gather_attention",
    "all_to_all_attention",
    "balanced_order",
    "context_parallel",
    "dispatch_to_experts",
    "expert_parallel",
    "ring_attention",
    "transfer",
]
