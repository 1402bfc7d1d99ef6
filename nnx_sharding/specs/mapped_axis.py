"""Axes along which ``vmap`` and ``scan`` map arrays: the leaves of their prefixes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """How one array enters or leaves each step of a mapped function.

    Attributes:
      index: the dimension along which it is mapped; None if it is not mapped.
      is_carry: whether each step gets what the previous one returned.
    """

    index: int | None = None
    is_carry: bool = False

    def __repr__(self) -> str:
        return "Carry" if self.is_carry else repr(self.index)


BROADCAST = Axis()
CARRY = Axis(is_carry=True)
