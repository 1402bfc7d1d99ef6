"""The opcodes of HLO, by what the operations do. Others are not understood."""

from __future__ import annotations

import functools
import re
from typing import Literal, TypeAlias, get_args


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


CollectiveKind: TypeAlias = Literal[  # these exchange data between devices
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all", "collective-broadcast",
]  # fmt: skip
COLLECTIVES = frozenset(get_args(CollectiveKind))

# One flop for each element of the result, as XLA counts.
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

# These move no data: they name it, or call computations, which count themselves.
FREE = _set(
    "add-dependency after-all bitcast call conditional constant domain get-tuple-element iota "
    "opt-barrier optimization-barrier parameter partition-id replica-id tuple while"
)
REARRANGING = _set("bitcast copy reshape transpose")  # these return the elements of their operand
# These pass on the elements of their first operand, or some of them, perhaps of another type.
MOVING = REARRANGING | _set("convert dynamic-slice slice")
SLICES = _set("slice dynamic-slice gather")  # these read as much as they return
PRODUCTS = _set("convolution dot ragged-dot")  # these sum over a dimension

# What can name other computations.
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

# What custom calls call. Compilers themselves call these to pass values on and to mark them; a
# callback to Python runs on the host, so that the device computes nothing.
MARKERS = _set(
    "AllocateBuffer AssumeGatherIndicesInBound AsyncCollectiveDone AsyncCollectiveStart "
    "ConcatBitcast GatherScatterIndicesBitpacked LayoutConstraint MoveToDevice MoveToHost "
    "PinToDevice Sharding SPMDFullToShardShape SPMDShardToFullShape SliceId ZeroCrop "
    "annotate_device_placement"
)
CALLBACK = re.compile(r"xla_\w*python_\w*callback")


@functools.lru_cache(maxsize=1024)
def base(opcode: str) -> str:
    """The operation that a pair such as ``all-gather-start`` and ``all-gather-done`` performs."""
    return opcode.removesuffix("-start").removesuffix("-update").removesuffix("-done")
