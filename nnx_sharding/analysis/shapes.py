"""Shapes of arrays as HLO writes them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

# More bytes or runs than any program has: the text is damaged.
MAX_SIZE = 1 << 62


class Shape(NamedTuple):
    """The shape of one array.

    Attributes:
      dtype: as HLO writes it, such as ``f32`` or ``bf16``.
      dims: the sizes of its dimensions; the upper bound of a dynamic one.
      bytes: the bytes of its elements, without padding.
      memory_space: the number of the memory that it is in; 5 is the memory of the host.
    """

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    memory_space: int = 0


Shapes: TypeAlias = "Shape | tuple[Shapes, ...]"


@functools.lru_cache(maxsize=4096)
def read_shape(text: str) -> Shapes:
    """Reads as much as it understands of a shape such as ``(bf16[8,64]{1,0:T(8,128)}, u32[])``."""
    levels: list[list[Shapes]] = [[]]
    for match in _SHAPE_TOKEN.finditer(text):
        if match[0] == "(":
            levels.append([])
        elif match[0] == ")" and len(levels) > 1:
            levels[-2].append(tuple(levels.pop()))
        elif match[1]:
            levels[-1].append(_array(*match.groups(default="")))
    while len(levels) > 1:
        levels[-2].append(tuple(levels.pop()))
    return levels[0][0] if len(levels[0]) == 1 else tuple(levels[0])


@functools.lru_cache(maxsize=4096)
def is_shape(text: str) -> bool:
    """Whether all of a shape is understood, including the widths of its dtypes."""
    rest = _SHAPE_TOKEN.sub("", text).strip(", ")
    dtypes = {match[1] for match in _SHAPE_TOKEN.finditer(text) if match[1]}
    is_known = all(_DTYPE.fullmatch(dtype) for dtype in dtypes)
    return not rest and is_known and text.count("(") == text.count(")")


_DTYPE = re.compile(r"pred|token|opaque|[a-z]+\d+\w*")


def arrays(shape: Shapes) -> Iterator[Shape]:
    """The arrays of a shape, in order."""
    stack = [shape]
    while stack:
        top = stack.pop()
        if isinstance(top, Shape):
            yield top
        else:
            stack.extend(reversed(top))


def total_bytes(shapes: Iterable[Shape]) -> int:
    """The bytes of several arrays."""
    return sum(shape.bytes for shape in shapes)


_SHAPE_TOKEN = re.compile(r"/\*.*?\*/|([a-z][a-z0-9]*)\[([^\[\]]*)\](?:\{([^{}]*)\})?|[()]")


@functools.lru_cache(maxsize=4096)
def _array(dtype: str, dims: str, layout: str) -> Shape:
    sizes = tuple(int(size) for size in re.findall(r"\d{1,18}", dims))
    width = re.search(r"\d{1,4}", dtype)
    bits = int(width[0]) if width else 8 if dtype == "pred" else 0
    packed = re.search(r"E\((\d{1,4})\)", layout)
    bits = int(packed[1]) if packed else -(-bits // 8) * 8
    space = re.search(r"S\((\d{1,4})\)", layout)
    size = min(-(-math.prod(sizes) * bits // 8), MAX_SIZE)
    return Shape(dtype, sizes, size, int(space[1]) if space else 0)
