"""The opcodes of HLO, by what the operations do. `OPCODES` has all that are understood."""

from __future__ import annotations

import functools
import re
from typing import Literal, TypeAlias, get_args


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


# The opcodes of operations that exchange data between devices.
CollectiveKind: TypeAlias = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all", "collective-broadcast",
]  # fmt: skip
COLLECTIVES = frozenset(get_args(CollectiveKind))

# Operations that count as one flop for each element of the result, because XLA counts them so.
ELEMENTWISE = _set(
    "abs add and bitcast-convert ceil clamp compare complex convert count-leading-zeros divide "
    "floor imag is-finite maximum minimum multiply negate not or popcnt real reduce-precision "
    "remainder round-nearest-afz round-nearest-even select shift-left shift-right-arithmetic "
    "shift-right-logical sign stochastic-convert subtract xor"
)
TRANSCENDENTAL = _set(
    "acos acosh asin asinh atan2 atanh cbrt cosh cosine erf exponential exponential-minus-one log "
    "log-plus-one logistic power rsqrt sine sinh sqrt tan tanh"
)

# Operations without work of their own: they only name data, or call computations, whose work
# counts on its own.
FREE = _set(
    "add-dependency after-all bitcast call conditional constant domain get-tuple-element iota "
    "opt-barrier optimization-barrier parameter partition-id replica-id tuple while"
)
# Operations that return exactly the elements of their operand.
REARRANGING = _set("bitcast copy reshape transpose")
# Operations that return elements of their first operand, all or some, perhaps of another type.
MOVING = REARRANGING | _set("convert dynamic-slice slice")
# Operations that read as much of their first operand as they return.
SLICES = _set("slice dynamic-slice gather")
# Operations that multiply two operands, and sum over a dimension.
PRODUCTS = _set("convolution dot ragged-dot")

# Operations that can name other computations.
CALLERS = _set(
    "all-reduce async call conditional custom-call fusion map reduce reduce-scatter reduce-window "
    "scan scatter select-and-scatter sort topk while"
)

OPCODES = COLLECTIVES | ELEMENTWISE | TRANSCENDENTAL | FREE | SLICES
OPCODES |= _set(
    "async batch-norm-grad batch-norm-inference batch-norm-training broadcast cholesky concatenate "
    "convolution copy custom-call dot dynamic-reshape dynamic-update-slice fft fusion "
    "get-dimension-size infeed map outfeed pad ragged-dot recv reduce reduce-window reshape "
    "reverse rng rng-bit-generator rng-get-and-update-state scaled-dot scan scatter "
    "select-and-scatter send set-dimension-size sort topk transpose triangular-solve"
)

# The targets of custom calls by which compilers pass values on or mark them. The device computes
# nothing for these.
MARKERS = _set(
    "AllocateBuffer AssumeGatherIndicesInBound AsyncCollectiveDone AsyncCollectiveStart "
    "ConcatBitcast GatherScatterIndicesBitpacked LayoutConstraint MoveToDevice MoveToHost "
    "PinToDevice Sharding SPMDFullToShardShape SPMDShardToFullShape SliceId ZeroCrop "
    "annotate_device_placement"
)
# The targets of callbacks to Python. The host runs these, so the device computes nothing.
CALLBACK = re.compile(r"xla_\w*python_\w*callback")


@functools.lru_cache(maxsize=1024)
def base(opcode: str) -> str:
    """Returns the opcode of an operation without ``-start``, ``-update`` or ``-done``.

    The pair ``all-gather-start`` and ``all-gather-done``, for example, performs an ``all-gather``.
    """
    return opcode.removesuffix("-start").removesuffix("-update").removesuffix("-done")
