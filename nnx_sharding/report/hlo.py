"""How many collectives there are in the text of a compiled program."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from ..analysis.collectives import CollectiveKind, collectives_of


def collectives(hlo_text: str) -> dict[CollectiveKind, int]:
    """Counts the collectives in a compiled program.

    An asynchronous collective is a pair of instructions (``all-gather-start`` and
    ``all-gather-done``) and counts once. Each instruction counts once, also in the body of a
    loop. Lines that are no HLO instructions are passed over, so any text will do; StableHLO,
    which is not yet partitioned and names its operations differently, gives zeros.

    With bytes, mesh axes and source lines ``Compiled.collectives()`` tells them.

    Args:
      hlo_text: HLO after compilation: ``function.lower(...).compile().as_text()``.

    Returns:
      The number of collectives of each kind, zeros included.

    Example:
      >>> from nnx_sharding.report import collectives
      >>> hlo = "ROOT %psum.7 = f32[64]{0} all-reduce(%dot.2), channel_id=1, to_apply=%add"
      >>> collectives(hlo)["all-reduce"]
      1
    """
    counts = Counter(one.kind for one in collectives_of(hlo_text))
    return {kind: counts[kind] for kind in get_args(CollectiveKind)}
