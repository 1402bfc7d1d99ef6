"""Warns of outputs of models that are gathered because operations outside of modules are typed.

On Explicit axes, the type of an array says how all of its dimensions are sharded. In a model with
a strategy the axes are Auto, and the compiler keeps logits sharded like the columns of the kernel
that made them. What the outermost module returns is typed like its first input instead, because JAX
raises an error for indexing and `top_k` on sharded columns: a loss for integer labels that is right
on one device would fail, and whether it does is only known when the operation is traced. So an
operation outside of modules gets whole logits, which is one all-gather more than the same operation
in a method of the model, unless the function returns them anyway.

Likewise a cache that a model makes itself, as in a prefill, is gathered over the axes that shard
its heads, also where the function returns it: `out_shardings` come after the gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import _compat
from ..errors import UnshardedWarning, message, users_line, warn_or_raise
from ..specs.fitting import axes_of, pad_entries, spec_axes
from ..specs.types import AxisName
from .axis_types import arrays_in
from .calls import Frame, Shape, Tag
from .explanations import exact_path
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


def sharded_heads(
    model: object, shape: Shape, sizes: Mapping[AxisName, int]
) -> tuple[int, frozenset[AxisName]] | None:
    """Finds the dimension of heads in an array of a model, and the axes that shard heads in it.

    It is (…, heads, …, features), and a projection in the model is (…, in, heads, features) or
    (…, in, heads * features), sharded over heads.

    Args:
      model: the model.
      shape: the shape of the array.
      sizes: the sizes of the axes that can shard heads.
    """
    tags: Iterable[Tag | None] = (_compat.tag_of(module) for _, module in modules_in(model))
    variables = [variable for tag in tags if tag is not None for variable in tag.specs.values()]
    *_, features = shape
    for dimension in range(len(shape) - 2, 0, -1):
        heads = shape[dimension]
        for variable in variables:
            entries = pad_entries(variable.inside, len(variable.shape))
            axes: tuple[AxisName, ...] = ()
            if len(variable.shape) > 2 and variable.shape[-2:] == (heads, features):
                axes = axes_of(entries[-2])
            elif len(variable.shape) > 1 and variable.shape[-1] == heads * features:
                axes = axes_of(entries[-1])
            devices = math.prod(sizes.get(axis, 1) for axis in axes)
            if devices > 1 and heads % devices == 0:
                return dimension, frozenset(axis for axis in axes if sizes.get(axis, 1) > 1)
    return None


class _GatheredOutput(NamedTuple):
    """An output of an outermost module that is gathered."""

    name: str
    array: jax.Array
    over: str  # the axes over which it is gathered, in words
    spec: PartitionSpec  # that it has then, or that a cache should have
    at: str = ""  # where the module is called, and how it is declared, for a cache

    def __str__(self) -> str:
        # Only a warning needs `analysis`, which takes long to import.
        from ..analysis.units import bytes_text

        size = bytes_text(self.array.size * self.array.dtype.itemsize)
        kind = jax.typeof(self.array).str_short(short_dtypes=True)
        remedy = f", at {self.at}: write {_short(self.spec)}" if self.at else ""
        return f"  {self.name}: {kind}, {size}, over {self.over}{remedy}"


class WholeOutputs:
    """What the outermost modules of a trace returned with fewer axes than their columns have."""

    def __init__(self) -> None:
        self._gathered: list[_GatheredOutput] = []
        self._caches: dict[str, list[_GatheredOutput]] = {}  # by how their specs are declared
        # The last layer that ran: how many columns it has, and the axes that shard them.
        self._last_layer: tuple[int, frozenset[AxisName]] = 0, frozenset()

    def begin_layer(self) -> None:
        """Forgets the columns of earlier layers, as later arrays do not have them."""
        self._last_layer = 0, frozenset()

    def end_layer(self, x: jax.Array, spec: PartitionSpec) -> None:
        """Remembers how a layer shards its columns."""
        self._last_layer = x.shape[-1], frozenset(spec_axes(spec))

    def add(
        self, frame: Frame, x: jax.Array, first: jax.Array, sizes: Mapping[AxisName, int]
    ) -> None:
        """Records an output of an outermost module, if it is gathered over axes of its columns.

        Args:
          frame: the call of the module.
          x: the output, typed.
          first: the first input. A last dimension of ``x`` that is also one of it is of the data,
            not of columns.
          sizes: the sizes of the axes that can shard columns.
        """
        name, model = frame.tag.accessor, frame.module
        spec = jax.typeof(x).sharding.spec
        # Tokens (batch, length) become (batch, length, columns).
        is_integer = jnp.issubdtype(first.dtype, jnp.integer)
        if x.ndim < max(2, first.ndim + is_integer) or x.shape == first.shape[: x.ndim]:
            return
        # More dimensions than activations have.
        if x.ndim > max(3, first.ndim + is_integer) and self._add_cache(frame, x, first, sizes):
            return
        axes = column_axes(model, x.shape[-1])
        columns, axes_of_layer = self._last_layer
        if columns == x.shape[-1]:
            axes |= axes_of_layer
        axes = axes.difference(spec_axes(spec))  # these still shard it
        if gathered := sorted((axis for axis in axes if sizes.get(axis, 1) > 1), key=str):
            over = ", ".join(map(repr, gathered))
            self._gathered.append(_GatheredOutput(name, x, over, spec))

    def _add_cache(
        self, frame: Frame, x: jax.Array, first: jax.Array, sizes: Mapping[AxisName, int]
    ) -> bool:
        """Records an output with heads that are gathered; returns whether it is one."""
        match = sharded_heads(frame.module, x.shape, sizes)
        spec = jax.typeof(x).sharding.spec
        if match is None or not match[1].isdisjoint(spec_axes(spec)):
            return False
        dimension, axes = match
        entries = [*pad_entries(spec, x.ndim)]
        batch = pad_entries(jax.typeof(first).sharding.spec, first.ndim)[0]
        # A cache of stacked layers, (layers, batch, …), has not the batch in front.
        if first.shape[0] in x.shape[:dimension] and not any(entries):
            entries[x.shape.index(first.shape[0])] = batch
        names = sorted(axes, key=str)
        entries[dimension] = names[0] if len(names) == 1 else (*names,)
        pattern, over = exact_path(frame.tag.path), ", ".join(map(repr, names))
        method = frame.method
        declared = f"{{{pattern!r}: InOutSharding(specs, method={method!r})}}"
        output = _GatheredOutput(
            f"{frame.tag.accessor}.{method}", x, over, PartitionSpec(*entries), users_line()
        )
        self._caches.setdefault(declared, []).append(output)
        return True

    def warn(self, name: str, result: object, *, strict: bool) -> None:
        """Warns of caches, and of columns that the function uses without returning them."""
        for declared, caches in self._caches.items():
            text = message(
                f"{name}: on Explicit axes, new arrays that a module returns are typed like its "
                "first input, so these are gathered over axes that shard their heads:",
                [*dict.fromkeys(map(str, caches))],
                f"Declare them, as out_shardings come too late: activation_shardings={declared}, "
                "where specs is a tuple (or pytree) with a spec for each array that it returns.",
            )
            warn_or_raise(UnshardedWarning, text, strict=strict, anchor="gathered-cache")
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
