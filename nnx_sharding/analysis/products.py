"""What products compute: of matrices, convolutions and attention, also in calls of libraries."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from .instructions import Instruction, Shape
from .opcodes import PRODUCTS

ByName: TypeAlias = Mapping[str, Instruction]  # the instructions of a computation

# Above this number of kernel positions, they are not examined one by one, and padding counts.
_MAX_POSITIONS = 1 << 22


def product_flops(one: Instruction, by_name: ByName) -> int | None:
    """The flops of a product; None for other instructions, and for masks that depend on values."""
    operands = [made_by(by_name, name) for name in one.operand_names]
    if len(operands) < 2 or not one.results or not all(operands[:2]):
        return None
    lhs, rhs, result = operands[0][0].dims, operands[1][0].dims, one.results[0].dims
    if one.opcode == "convolution" or one.target.startswith("__cudnn$conv"):
        # The window of a backward pass is that of the forward pass.
        if one.target == "__cudnn$convBackwardInput":
            lhs, result = result, lhs
        elif one.target == "__cudnn$convBackwardFilter":
            rhs, result = result, rhs
        return _convolution_flops(one, lhs, rhs, result)
    config = one.attributes.get("backend_config", "")
    if one.target.startswith("__cudnn$fmha"):
        return _attention_flops(config, [shapes[0].dims for shapes in operands if shapes])
    # The dimensions that a product sums over; those of a library are in its configuration.
    summed = one.attributes.get("lhs_contracting_dims")
    if summed is None and one.opcode == "custom-call" and (found := _SUMMED.search(config)):
        summed = found[1]
    if summed is None and one.opcode not in PRODUCTS:
        return None
    axes = [int(axis) for axis in re.findall(r"\d{1,3}", summed or "")]
    if any(axis >= len(lhs) for axis in axes):
        return None
    return 2 * math.prod(result) * math.prod(lhs[axis] for axis in axes)


_SUMMED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def is_library_call(one: Instruction) -> bool:
    """Whether it calls cuBLAS or cuDNN."""
    return one.opcode == "custom-call" and one.target.startswith(("__cublas$", "__cudnn$"))


def made_by(by_name: ByName, name: str) -> Sequence[Shape]:
    """The arrays that an instruction makes; none for one that damaged text lacks."""
    return by_name[name].results if name in by_name else ()


def _attention_flops(config: str, operands: Sequence[Sequence[int]]) -> int | None:
    """Two products forward, four backward and the scores again, where the mask leaves them."""
    found = [pattern.search(config) for pattern in _ATTENTION]
    scores, mask, window = (match[1] if match else "" for match in found)
    if not scores or len(operands) < 3 or not all(operands) or _PAGED in config:
        return None
    *batch, queries, keys = (int(size) for size in re.findall(r"\d{1,18}", scores))
    width = int(window or keys) or keys
    if mask == "CAUSAL":
        most = min(width, keys)  # of the keys of one query
        growing = min(queries, most)
        positions = growing * (growing + 1) // 2 + (queries - growing) * most
    elif mask in ("NO_MASK", "ALIBI") and width == keys:
        positions = queries * keys
    else:
        return None
    of_scores, of_values = operands[0][-1], operands[2][-1]
    each = 3 * of_scores + 2 * of_values if "_grad_gemm" in config else of_scores + of_values
    return 2 * math.prod(batch) * positions * each


_ATTENTION = [
    re.compile(pattern)
    for pattern in (
        r'"intermediate_tensor_shape":\{"dimensions":\[([^\]]*)\]',
        r'"mask_type":"(\w+)"',
        r'"sliding_window_length":"?(\d{1,18})',
    )
]
_PAGED = '"is_paged_attention":true'


def _convolution_flops(
    one: Instruction, lhs: Sequence[int], rhs: Sequence[int], result: Sequence[int]
) -> int | None:
    """Two for each multiplication, except with zeros of padding or between elements."""
    labels = _LABELS.fullmatch(one.attributes.get("dim_labels", ""))
    if labels is None:
        return None
    dims = zip(labels.groups(), (lhs, rhs, result), strict=True)
    inputs, kernel, outputs = (dict(zip(names, sizes, strict=False)) for names, sizes in dims)
    window = window_of(one)
    count: int = kernel.get("i", 0) * outputs.get("b", 0) * outputs.get("f", 0)
    for axis in filter(str.isdigit, kernel):
        at = int(axis)
        stride, low, dilation, spacing = (
            window[key][at] if at < len(window.get(key, ())) else default
            for key, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
        )
        count *= positions(
            inputs.get(axis, 0), kernel[axis], outputs.get(axis, 0), stride, low, dilation, spacing
        )
    return 2 * count


@functools.lru_cache(maxsize=1024)
def positions(
    size: int, kernel: int, outputs: int, stride: int, low: int, dilation: int, spacing: int
) -> int:
    """The number of elements in all windows of a kernel in one dimension, without padding."""
    if kernel * outputs > _MAX_POSITIONS or not dilation:
        return kernel * outputs
    at = np.arange(outputs)[:, None] * stride + np.arange(kernel) * spacing - low
    return int(((at >= 0) & (at % dilation == 0) & (at // dilation < size)).sum())


_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")


def window_of(one: Instruction) -> dict[str, list[int]]:
    """The numbers of a window by name; for paddings, which are pairs, the lower one."""
    text = one.attributes.get("window", "")
    return {
        name: [int(number) for number in re.findall(r"(?:^|x)(-?\d{1,9})", numbers)]
        for name, numbers in re.findall(r"(\w+)=([-\dx_]+)", text)
    }
