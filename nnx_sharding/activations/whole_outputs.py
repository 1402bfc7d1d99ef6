"""Warns of outputs of models that are gathered because operations outside of modules are typed.

On Explicit axes, the type of an array says how all of its dimensions are sharded. In a model with
a strategy the axes are Auto, and the compiler keeps logits sharded like the columns of the kernel
that made them. What the outermost module returns is typed like its first input instead, because JAX
raises an error for indexing and `top_k` on sharded columns: a loss for integer labels that is right
on one device would fail, and whether it does is only known when the operation is traced. So an
operation outside of modules gets whole logits, which is one all-gather more than the same operation
in a method of the model, unless the function returns them anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import _compat
from ..errors import UnshardedWarning, message, warn_or_raise
from ..specs.fitting import axes_of, pad_entries, spec_axes
from ..specs.types import AxisName
from .axis_types import arrays_in
from .calls import Shape, Tag
from .variables import modules_in


def column_axes(model: object, size: int) -> frozenset[AxisName]:
    """Returns the mesh axes over which a model shards all dimensions of its Variables of a size.

    An output of this size is sharded like these: the logits of a model like its vocabulary.
    """
    tags: Iterable[Tag | None] = (_compat.tag_of(module) for _, module in modules_in(model))
    variables = [variable for tag in tags if tag is not None for variable in tag.specs.values()]
    entries = [axes for x in variables for axes in _axes_of_size(x.inside, x.shape, size)]
    return frozenset[Any].intersection(*map(frozenset, entries)) if entries else frozenset()


def _axes_of_size(spec: PartitionSpec, shape: Shape, size: int) -> list[tuple[AxisName, ...]]:
    """Lists the axes of each dimension of a size."""
    pairs = zip(pad_entries(spec, len(shape)), shape, strict=True)
    return [axes_of(entry) for entry, length in pairs if length == size]


class _GatheredOutput(NamedTuple):
    """An output of an outermost module that is gathered."""

    name: str
    array: jax.Array
    over: str  # the axes over which it is gathered, in words
    spec: PartitionSpec  # that it has then

    def __str__(self) -> str:
        # Only a warning needs `analysis`, which takes long to import.
        from ..analysis.units import bytes_text

        size = bytes_text(self.array.size * self.array.dtype.itemsize)
        kind = jax.typeof(self.array).str_short(short_dtypes=True)
        return f"  {self.name}: {kind}, {size}, over {self.over}"


class WholeOutputs:
    """What the outermost modules of a trace returned with fewer axes than their columns have."""

    def __init__(self) -> None:
        self._gathered: list[_GatheredOutput] = []
        # The last layer that ran: how many columns it has, and the axes that shard them.
        self._last_layer: tuple[int, frozenset[AxisName]] = 0, frozenset()

    def begin_layer(self) -> None:
        """Forgets the columns of earlier layers, as later arrays do not have them."""
        self._last_layer = 0, frozenset()

    def end_layer(self, x: jax.Array, spec: PartitionSpec) -> None:
        """Remembers how a layer shards its columns."""
        self._last_layer = x.shape[-1], frozenset(spec_axes(spec))

    def add(
        self,
        name: str,
        model: object,
        x: jax.Array,
        first: jax.Array,
        sizes: Mapping[AxisName, int],
    ) -> None:
        """Records an output of an outermost module, if it is gathered over axes of its columns.

        Args:
          name: the module, as an expression.
          model: the module.
          x: the output, typed.
          first: the first input. A last dimension of ``x`` that is also one of it is of the data,
            not of columns.
          sizes: the sizes of the axes that can shard columns.
        """
        spec = jax.typeof(x).sharding.spec
        # Tokens (batch, length) become (batch, length, columns).
        is_integer = jnp.issubdtype(first.dtype, jnp.integer)
        if x.ndim < max(2, first.ndim + is_integer) or x.shape == first.shape[: x.ndim]:
            return
        axes = column_axes(model, x.shape[-1])
        columns, axes_of_layer = self._last_layer
        if columns == x.shape[-1]:
            axes |= axes_of_layer
        axes = axes.difference(spec_axes(spec))  # these still shard it
        if gathered := sorted((axis for axis in axes if sizes.get(axis, 1) > 1), key=str):
            over = ", ".join(map(repr, gathered))
            self._gathered.append(_GatheredOutput(name, x, over, spec))

    def warn(self, name: str, result: object, *, strict: bool) -> None:
        """Warns of outputs that the function uses instead of returning them in ``result``."""
        returned = {id(x) for x in arrays_in(result)}
        used = [output for output in self._gathered if id(output.array) not in returned]
        if not used:
            return
        text = message(
            f"{name}: on Explicit axes, operations outside of modules get whole arrays, so what "
            "these modules return is gathered over axes that shard its last dimension:",
            [*dict.fromkeys(map(str, used))],
            "Compute what follows, such as a loss, in a method of the model: nothing is gathered "
            "then. Or use jit(..., auto_axes=True), with out_shardings. If it has to be whole, say "
            f"so: activation_shardings={{'^$': {_short(used[0].spec)}}}; of a module that returns "
            "several arrays, in a tuple for these.",
        )
        warn_or_raise(UnshardedWarning, text, strict=strict, anchor="gathered-output")


def _short(spec: PartitionSpec) -> PartitionSpec:
    """Returns a spec without the trailing dimensions that are not sharded."""
    entries = [*spec.partitions]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
