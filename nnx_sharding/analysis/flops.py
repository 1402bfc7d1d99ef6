"""The flops of single instructions, by the shapes of what they take and make.

A flop is an addition, multiplication or other operation on a pair of real numbers, so that figures
compare with peak rates, of which a multiply-add is two:

    elementwise   1 for each element, as XLA counts; of complex ones `_COMPLEX` (6 to multiply)
    product       2·m·k·n (`product_flops`); complex 8·m·k·n
    window        those on elements, without padding (`elements_in_windows`)
    fft           5·n·log2(n) for n complex points, half of that for real ones
    sort          a comparison counts 1; n·log2(n) of them for each row of n

What an instruction *applies* to elements, such as the addition of a ``reduce``, is a computation,
whose flops are not known here: `applications` says how often it runs.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from .instructions import Instruction, Operands, Shape
from .opcodes import CALLBACK, ELEMENTWISE, PRODUCTS

# Larger windows, or more in one dimension, are not examined one by one, and padding counts.
_MAX_WINDOWS = 1 << 22
_MAX_WINDOW = 1 << 30

# Real operations for one of complex numbers: (a + bi)(c + di) is 4 multiplications and 2 additions,
# a quotient multiplies by the conjugate and divides twice. Others, such as `select`, count 1.
_COMPLEX = {"add": 2, "subtract": 2, "negate": 2, "multiply": 6, "divide": 11, "abs": 3}
# Opcodes that compilers expand, or replace by custom calls.
_UNKNOWN = {"batch-norm-grad", "batch-norm-inference", "batch-norm-training", "cholesky", "scan"}
_UNKNOWN |= {"scaled-dot", "triangular-solve"}
_SORTS = re.compile(r"(__gpu\$)?TopK|__topk|__cub\$")
# The TPU compiler's kernel that finds the rows of each group in front of a `ragged_dot`. The kernel
# only adds up one integer for each group, so it counts as 0 flops.
_RAGGED_DOT_METADATA = "ragged-dot-metadata"


def product_flops(instruction: Instruction, operands: Operands) -> int | None:
    """Counts the flops of a dot, a convolution, or a library's call for one or for attention.

    Returns None for other instructions, and for attention with a mask that depends on values.
    """
    # If damaged text lacks the instruction that makes an operand, the operand has no arrays.
    if len(operands) < 2 or not instruction.results or not all(operands[:2]):
        return None
    lhs, rhs, result = operands[0][0].dims, operands[1][0].dims, instruction.results[0].dims
    if instruction.opcode == "convolution" or instruction.target.startswith("__cudnn$conv"):
        # A call of the backward pass has the window of the forward convolution. It takes the
        # gradient of the forward output, and makes the gradient of the forward input or kernel. The
        # shapes are put back in the order of the forward pass, because that has as many flops.
        if instruction.target == "__cudnn$convBackwardInput":
            lhs, result = result, lhs
        elif instruction.target == "__cudnn$convBackwardFilter":
            rhs, result = result, rhs
        return _convolution_flops(instruction, lhs, rhs, result)
    if instruction.target.startswith("__cudnn$fmha"):
        config = instruction.attributes.get("backend_config", "")
        return _attention_flops(config, [shapes[0].dims for shapes in operands if shapes])
    return _dot_flops(instruction, lhs, result)


def _dot_flops(instruction: Instruction, lhs: Sequence[int], result: Sequence[int]) -> int | None:
    """Counts the flops of a product: a multiplication and an addition for each term of its sums.

    Args:
      lhs: the shape of its first operand.
      result: the shape of its result.

    Returns:
      The flops; None if it is no product, or its text is damaged.
    """
    # The text with the dimensions of ``lhs`` that the product sums over. A dot has the attribute
    # ``lhs_contracting_dims={1}``; the call of a library has a list in its configuration.
    summed = instruction.attributes.get("lhs_contracting_dims")
    if summed is None and instruction.opcode == "custom-call":
        match = _SUMMED.search(instruction.attributes.get("backend_config", ""))
        summed = match[1] if match else None
    if summed is None and instruction.opcode not in PRODUCTS:
        return None
    # An outer product sums over no dimension, so it may lack the text.
    axes = [int(axis) for axis in re.findall(r"\d{1,3}", summed or "")]
    if any(axis >= len(lhs) for axis in axes):
        return None
    terms = math.prod(lhs[axis] for axis in axes)  # the number of terms in each sum
    return 2 * math.prod(result) * terms * _real_multiply_adds(instruction)


def _real_multiply_adds(product: Instruction) -> int:
    """Counts the real multiply-adds in one multiply-add of a product: 4 if it is complex."""
    return 4 if _is_complex(product.results[0]) else 1


# "lhs_contracting_dimensions":["1"]
_SUMMED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def _attention_flops(config: str, operands: Sequence[Sequence[int]]) -> int | None:
    """Counts the flops of attention in cuDNN, at the positions that its mask leaves.

    The forward pass has two products: of queries and keys, which are the scores, and of
    probabilities and values. The backward pass has five: it computes the scores again, and the
    gradients of queries, keys, probabilities and values.

    Args:
      config: the text in which XLA configures the call, such as ``{"mask_type":"CAUSAL", …}``.
      operands: the shapes of queries, keys and values, (…, width of a head).

    Returns:
      The flops; None if the mask depends on values, or the text is not understood.
    """
    scores, mask, window = (_text(pattern, config) for pattern in (_SCORES, _MASK, _WINDOW))
    if not scores or len(operands) < 3 or not all(operands) or _PAGED in config:
        return None
    *batch, queries, keys = (int(size) for size in re.findall(r"\d{1,18}", scores))
    width = int(window or keys) or keys  # how many keys a query attends to; 0 stands for all
    # ``positions`` counts the pairs of a query and a key that the mask leaves. A sliding window is
    # understood only together with a causal mask.
    if mask == "CAUSAL":
        most = min(width, keys)  # the largest number of keys of one query
        growing = min(queries, most)  # The first queries have 1, 2, 3 … keys.
        positions = growing * (growing + 1) // 2 + (queries - growing) * most
    elif mask in ("NO_MASK", "ALIBI") and width == keys:
        positions = queries * keys
    else:  # The mask depends on values.
        return None
    key_width = operands[0][-1]
    value_width = operands[2][-1]
    per_position = key_width + value_width
    if "_grad_gemm" in config:  # The call is of the backward pass.
        # The products for scores and for the gradients of queries and keys have the width of keys.
        # Those for the gradients of probabilities and values have the width of values.
        per_position = 3 * key_width + 2 * value_width
    return 2 * math.prod(batch) * positions * per_position


def _text(pattern: re.Pattern[str], config: str) -> str:
    """Returns the first group of the first match of a pattern; empty without a match."""
    match = pattern.search(config)
    return match[1] if match else ""


_SCORES = re.compile(
    r'"intermediate_tensor_shape":\{"dimensions":\[([^\]]*)\]'
)  # "2","8","64","64"
_MASK = re.compile(r'"mask_type":"(\w+)"')
_WINDOW = re.compile(r'"sliding_window_length":"?(\d{1,18})')
_PAGED = '"is_paged_attention":true'


def _convolution_flops(
    instruction: Instruction, lhs: Sequence[int], rhs: Sequence[int], result: Sequence[int]
) -> int | None:
    """Counts the flops of a convolution, without products with zeros of padding or dilation.

    ``lhs``, ``rhs`` and ``result`` are the shapes of input, kernel and output. Returns None if the
    text does not say what their dimensions are.
    """
    labels = _LABELS.fullmatch(instruction.attributes.get("dim_labels", ""))
    if labels is None:
        return None
    # In `b01f_01io->b01f`, for an image, b is the batch, f are the features of input and output, i
    # and o the input and output features of the kernel, and digits are spatial dimensions. The
    # three dicts below have the size of each dimension by its label.
    dims = zip(labels.groups(), (lhs, rhs, result), strict=True)
    inputs, kernel, outputs = (dict(zip(names, sizes, strict=False)) for names, sizes in dims)
    window = window_of(instruction)
    # Each element of the output is a sum over input features and over the window. Damaged text may
    # lack a label, and then counts as 0 flops.
    products: int = kernel.get("i", 0) * outputs.get("b", 0) * outputs.get("f", 0)
    products *= _real_multiply_adds(instruction)
    for axis in filter(str.isdigit, kernel):
        in_window = elements_in_windows(
            size=inputs.get(axis, 0),
            kernel=kernel[axis],
            outputs=outputs.get(axis, 0),
            **_window_along(window, int(axis)),
        )
        products *= int(in_window.sum())
    return 2 * products


def _window_along(window: Mapping[str, Sequence[int]], axis: int) -> dict[str, int]:
    """Returns the numbers of a window in one dimension, for :func:`elements_in_windows`.

    ``window`` is the result of :func:`window_of`. It lacks numbers that have their default in all
    dimensions, because HLO leaves these out.
    """

    def number(key: str, default: int) -> int:
        """Returns the number with this name in the dimension, or its default."""
        return window[key][axis] if axis < len(window.get(key, ())) else default

    return {
        "stride": number("stride", 1),
        "low": number("pad", 0),  # Padding behind the last element is not needed.
        "dilation": number("lhs_dilate", 1),  # the dilation of the input
        "spacing": number("rhs_dilate", 1),  # the dilation of the kernel
    }


@functools.lru_cache(maxsize=1024)
def elements_in_windows(
    size: int, kernel: int, outputs: int, stride: int, low: int, dilation: int, spacing: int
) -> np.ndarray:
    """Counts the elements in each window of a kernel in one dimension, without padding.

    Args:
      size: the size of the input.
      kernel: the size of the kernel.
      outputs: how many windows there are.
      stride: the distance from window to window.
      low: the padding before the first element of the input.
      dilation: the distance of elements of the input, with zeros in between.
      spacing: the distance of elements of the kernel.

    Returns:
      The counts, of shape (outputs,). For windows that are too large or too many, a single count of
      all of them, with padding: of shape (1,).
    """
    largest = max(size, kernel, stride, abs(low), dilation, spacing)
    if outputs > _MAX_WINDOWS or largest > _MAX_WINDOW or min(dilation, spacing) < 1:
        return np.array([kernel * outputs])
    # Element k of a window is at position start + k·spacing: within the input, dilated by zeros,
    # for k from `first` to `last`.
    start = np.arange(outputs) * stride - low
    first = np.maximum(0, -(start // spacing))  # rounded up
    last = np.minimum(kernel - 1, ((size - 1) * dilation - start) // spacing)
    # Element k is no zero of the dilation if start + k·spacing is a multiple of the dilation. Let
    # `common` be the greatest common divisor of spacing and dilation: a solution exists only if
    # `common` divides `start`. The equation divided by `common` is k · (spacing / common) ≡
    # -start / common modulo `step`, so that k ≡ `offset`.
    common = math.gcd(spacing, dilation)
    step = dilation // common
    inverse = pow(spacing // common, -1, step)  # modulo step
    offset = (-start // common) * inverse % step
    # The number of k among offset, offset + step, … that are at most `last`, less the number of
    # those that are smaller than `first`.
    counts = (last - offset) // step - (first - 1 - offset) // step
    has_elements = (start % common == 0) & (last >= first)
    return np.where(has_elements, counts, 0)


_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")


def window_of(instruction: Instruction) -> dict[str, list[int]]:
    """Reads the numbers of a window: a list of one number for each dimension, by name.

    For example, ``{size=3x3 pad=1_1x0_0}`` becomes ``{"size": [3, 3], "pad": [1, 0]}``: a padding
    has two numbers, before and behind the array, and only the first one is read. Other names are
    ``stride``, ``lhs_dilate`` (of the input) and ``rhs_dilate`` (of the window).
    """
    text = instruction.attributes.get("window", "")
    return {
        # The first number of each dimension: "1_1x0_0" → 1, 0. At most nine digits are read,
        # because damaged text may have any number.
        name: [int(number) for number in re.findall(r"(?:^|x)(-?\d{1,9})", numbers)]
        for name, numbers in re.findall(r"(\w+)=([-\dx_]+)", text)
    }


def other_flops(instruction: Instruction, operands: Operands) -> int | None:
    """Counts the flops of an instruction that is not a product; None if unknown.

    The flops of a computation that it applies to elements are not counted here (`applications`).
    Instructions that only move data have 0 flops.
    """
    opcode, results = instruction.opcode, instruction.results
    elements = num_elements(results)
    if opcode in ELEMENTWISE:
        arrays = [*results, *itertools.chain.from_iterable(operands)]
        # The result of an ``abs`` is real, so the operands count, too.
        is_complex = any(map(_is_complex, arrays))
        return elements * (_COMPLEX.get(opcode, 1) if is_complex else 1)
    if opcode in ("all-reduce", "all-reduce-start"):
        # An addition counts for each element; a complex one is two additions.
        return sum(math.prod(x.dims) * (2 if _is_complex(x) else 1) for x in results)
    if opcode in ("sort", "topk") or _SORTS.match(instruction.target):
        # The result of a `topk` has fewer elements than are sorted, so the largest array counts.
        largest = max([results, *operands], key=num_elements)[0]
        dims = largest.dims or (1,)
        # The dimension that is sorted along: ``dimensions={1}``, or the last one.
        axis = re.search(r"\d{1,3}", instruction.attributes.get("dimensions", ""))
        row = dims[int(axis[0]) if axis else -1]
        return math.prod(dims) * max(row - 1, 0).bit_length()  # log2(row), rounded up
    if opcode == "fft":
        return _fft_flops(instruction)
    if opcode == "custom-call":
        # A callback to Python runs on the host, so the device computes nothing. The work of other
        # calls is not known.
        is_callback = CALLBACK.match(instruction.target) is not None
        return 0 if is_callback or instruction.operation == _RAGGED_DOT_METADATA else None
    return None if opcode in _UNKNOWN else 0


def _fft_flops(fft: Instruction) -> int:
    """Counts the flops of an FFT over the last dimensions, whose sizes are ``fft_length={n,m}``."""
    dims = fft.results[0].dims
    lengths = [int(text) for text in re.findall(r"\d{1,9}", fft.attributes["fft_length"])]
    rows = math.prod(dims[: len(dims) - len(lengths)])
    # An FFT over n × m points is m FFTs of n points, and n FFTs of m points. Their flops are those
    # of one FFT of all n·m points.
    points = math.prod(lengths)
    is_real = "RFFT" in fft.attributes.get("fft_type", "")
    return round((2.5 if is_real else 5) * rows * points * math.log2(max(points, 1)))


def _is_complex(shape: Shape) -> bool:
    return shape.dtype in ("c64", "c128")


def applications(instruction: Instruction, operands: Operands) -> list[tuple[str, int]]:
    """Returns pairs: a computation that an instruction applies to elements, and how often.

    A ``reduce`` of 8 numbers to one, for example, applies its addition 7 times.
    """
    opcode, callees = instruction.opcode, instruction.callees
    if opcode not in ("reduce", "reduce-window", "select-and-scatter", "scatter", "map"):
        return []
    if not operands:  # Only damaged text lacks operands.
        return []
    # A reduce or scatter of several arrays of one shape applies its computation to an element of
    # each at once, so only one array is counted: the first array, or the last update.
    array, results = operands[0], instruction.results
    if opcode == "select-and-scatter":
        # The first computation selects one element in each window of the array. The second one adds
        # an element of the source there. Damaged text may lack the source.
        source = operands[1] if len(operands) > 1 else array
        counts = [_joined_in_windows(instruction, array, source), num_elements(source)]
        return [*zip(callees, counts, strict=False)]
    if opcode == "reduce":
        count = max(num_elements(array) - num_elements(results), 0)
    elif opcode == "reduce-window":
        count = _joined_in_windows(instruction, array, results)
    elif opcode == "scatter":
        count = num_elements(operands[-1])  # The last operand is an update.
    else:  # The opcode is map.
        count = num_elements(results)
    return [(callee, count) for callee in callees]


def _joined_in_windows(
    instruction: Instruction, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> int:
    """Counts how often two elements are joined to reduce each window of an array to one element.

    Args:
      inputs: the array, as a list of one shape.
      outputs: an array with one element for each window, as a list of one shape.

    Returns:
      The count; 0 if the text is damaged.
    """
    window = window_of(instruction)
    sizes = window.get("size", [])
    if not inputs or not outputs or not sizes:
        return 0
    if not len(sizes) == len(inputs[0].dims) == len(outputs[0].dims):
        return 0
    # A reduction of n elements whose result is repeated n times can be written as n windows of
    # 2n - 1, so that each covers all elements. It counts as one reduction.
    if all(n == 1 or n >= 2 * dim - 1 for n, dim in zip(sizes, outputs[0].dims, strict=False)):
        return num_elements(inputs)
    # The computation joins n elements in n - 1 applications. Counts of several dimensions multiply.
    elements = 1  # the number of elements in all windows, without padding
    windows = 1  # the number of windows that are not empty
    for axis, size in enumerate(inputs[0].dims):
        in_window = elements_in_windows(
            size=size,
            kernel=sizes[axis],
            outputs=outputs[0].dims[axis],
            **_window_along(window, axis),
        )
        elements *= int(in_window.sum())
        windows *= int((in_window > 0).sum())
    return elements - windows


def num_elements(shapes: Sequence[Shape]) -> int:
    """Counts the elements of the first array; 0 without one."""
    return math.prod(shapes[0].dims) if shapes else 0
