"""What the devices exchange, read from the text of a compiled program."""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal, TypeAlias, get_args

CollectiveKind: TypeAlias = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
]


def collectives(hlo_text: str) -> dict[CollectiveKind, int]:
    """Counts the collectives in a compiled program.

    An asynchronous collective is a pair of instructions (``all-gather-start`` and
    ``all-gather-done``) and counts once. Each instruction counts once, also in the body of a
    loop. Lines that are no HLO instructions are passed over, so any text will do; StableHLO,
    which is not yet partitioned and names its operations differently, gives zeros.

    Args:
      hlo_text: HLO after compilation: ``function.lower(...).compile().as_text()``.

    Returns:
      The number of collectives of each kind, zeros included.

    Example:
      >>> from nnx_sharding.inspect import collectives
      >>> hlo = "ROOT %psum.7 = f32[64]{0} all-reduce(%dot.2), channel_id=1, to_apply=%add"
      >>> collectives(hlo)["all-reduce"]
      1
    """
    opcodes = Counter(
        instruction.group(1).removesuffix("-start")
        for instruction in map(_INSTRUCTION.match, _QUOTED.sub('""', hlo_text).splitlines())
        if instruction
    )
    return {kind: opcodes[kind] for kind in get_args(CollectiveKind)}


# Names and metadata may hold anything, also what looks like an instruction.
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')

# `ROOT %name = shape opcode(operands), ...`; the shape may be a tuple and have a layout such
# as `{1,0:T(8,128)}`, where no parenthesis follows a word after a space.
_INSTRUCTION = re.compile(r"\s*(?:ROOT\s+)?\S+ = \S.*?\s([a-z][a-z0-9\-]*)\(")
