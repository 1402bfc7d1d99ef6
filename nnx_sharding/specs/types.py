"""Names for types that have no common base, and the specs of mapped arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

AnyMesh: TypeAlias = Mesh | AbstractMesh
AxisName: TypeAlias = Hashable  # the name of a mesh axis, nearly always a string

# An array of JAX or NumPy, a tracer, an abstract array, a number or a reference. Before arguments
# have been checked it may also be anything else that the user passed.
AnyArray: TypeAlias = Any
# The arrays of a graph, by slot.
Arrays: TypeAlias = Sequence[AnyArray]
# The objects with an identity of a graph: modules, Variables, references, static objects.
Objects: TypeAlias = Sequence[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """How an array enters or leaves each step of a mapped function; a spec instead of a sharding.

    Attributes:
      index: the dimension along which the array is mapped; None if it is not mapped.
      is_carry: whether each step gets the array that the previous step returned.
    """

    index: int | None = None
    is_carry: bool = False

    def __repr__(self) -> str:
        return "Carry" if self.is_carry else repr(self.index)


BROADCAST = Axis()
CARRY = Axis(is_carry=True)

# The spec of one array, as the user writes it or in its final form; None leaves it to JAX.
Spec: TypeAlias = PartitionSpec | Sharding | Format | Axis | None
