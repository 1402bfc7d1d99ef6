"""Warns of outputs of models that are gathered because operations outside of modules are typed.

On Explicit axes, the type of an array says how all of its dimensions are sharded. In a model with
a strategy the axes are Auto, and the compiler keeps logits sharded like the columns of the kernel
that made them. An output of the outermost module is typed like its first input instead, because JAX
raises an error for indexing and `top_k` on sharded columns. A loss for integer labels that is right
on one device would fail, and only the trace of the operation shows whether it does. So an operation
outside of modules gets whole logits, which is one all-gather more than the same operation in a
method of the model.

In the same way, a cache that a model makes itself, for example in a prefill, is gathered over the
axes that shard its heads.

No operation uses an array that the function only returns. With a declared sharding the array goes
there right from the Auto axes (``core/retyping.py``), and nothing is gathered. Without one it is
whole, too, because callers index it.

*Columns* are the last dimension of an array, such as the vocabulary of logits. A `Frame` is a call
of a module, with its ``tag``; a tag has the ``specs`` of the module's Variables by path, each with
the spec ``inside`` of the module and the ``shape``. `LEFT_AUTO_AXES` records which arrays have left
Auto axes in the function that is traced; in its ``declared`` are the ids of those that the function
has returned with a declared sharding. `Scope` (``tracing.py``) calls the methods of `WholeOutputs`:
``begin_layer`` before a module with Variables of its own runs, ``end_layer`` for each output whose
columns are those of a kernel, ``add`` for each new output of an outermost module without a declared
sharding, and ``warn`` when the function has returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from .. import _compat
from ..core.flatten import flatten
from ..core.retyping import LEFT_AUTO_AXES, LeftAutoAxes
from ..core.transform import Sharded
from ..errors import UnshardedWarning, message, users_line, warn_or_raise
from ..specs.activation_sharding import InOutSharding
from ..specs.fitting import axes_of, entry_of, pad_entries, spec_axes
from ..specs.paths import KEYS, WRAPPERS, Path
from ..specs.types import AxisName
from .calls import Frame, Shape, Tag, VariableSpecs
from .explanations import exact_path
from .variables import modules_in


def column_axes(model: object, size: int) -> frozenset[AxisName]:
    """Returns the mesh axes that shard the columns of a model's output, found by their number.

    They are the axes that shard each dimension of this size in the Variables of the model. For
    logits of 50,000 words, these are the dimensions of the vocabulary in an embedding and a head.
    Only the size says that the dimensions belong together, so an axis that shards just some of them
    does not count. The result is empty if no Variable has such a dimension.

    Args:
      model: the module that returns the output.
      size: the number of columns.
    """
    axes_of_dims: list[frozenset[AxisName]] = []  # the axes of each dimension of this size
    for _, variable in _variables_with_specs(model):
        # The entries are those of the spec while the module runs.
        entries = pad_entries(variable.inside, len(variable.shape))
        for entry, length in zip(entries, variable.shape, strict=True):
            if length == size:
                axes_of_dims.append(frozenset(axes_of(entry)))
    return frozenset.intersection(*axes_of_dims) if axes_of_dims else frozenset()


def _variables_with_specs(model: object) -> Iterator[tuple[Path, VariableSpecs]]:
    """Yields the specs of the Variables in a model, each after the path of the Variable."""
    for path, module in modules_in(model):
        tag: Tag | None = _compat.tag_of(module)
        if tag is not None:
            for own_path, specs in tag.specs.items():
                yield (*path, *own_path), specs


class Heads(NamedTuple):
    """The heads in an array of a model."""

    dimension: int | None  # the dimension of the heads; None if several may be that
    axes: frozenset[AxisName]  # the axes that shard the heads


def sharded_heads(model: object, shape: Shape, sizes: Mapping[AxisName, int]) -> Heads | None:
    """Finds the heads in an array of a model, such as a cache; None if nothing shards them.

    The array is (…, heads, …, features), with the length before or after the heads. Its projection
    is (…, in, heads, features) or (…, in, heads * features). So each dimension except the first and
    the last may be that of heads, and is if a kernel has as many heads. Other kernels may have as
    many outputs as length * features. So if any kernels are named as projections to keys or values,
    only these decide.

    Args:
      model: the model.
      shape: the shape of the array.
      sizes: the sizes of the axes that can shard heads.
    """
    by_named_kernels: list[Heads] = []  # from kernels named as projections to keys or values
    by_other_kernels: list[Heads] = []
    for path, variable in _variables_with_specs(model):
        # The name may be the module's or the kernel's: ("attention", "k_proj", "kernel") or
        # ("attention", "wk").
        names = [str(key) for key in path if key not in WRAPPERS]
        is_named = any(KEYS.fullmatch(name) for name in names[-2:])
        by_kernels = by_named_kernels if is_named else by_other_kernels
        for dimension in range(1, len(shape) - 1):  # without the first one and the features
            axes = _axes_of_heads(variable, shape[dimension], shape[-1], sizes)
            if axes is not None:  # None: the Variable is no projection to as many heads
                by_kernels.append(Heads(dimension, axes))
    candidates = by_named_kernels or by_other_kernels
    axes_of_all = frozenset[AxisName]().union(*(heads.axes for heads in candidates))
    if not axes_of_all:
        return None
    dimensions = {heads.dimension for heads in candidates}
    # If kernels disagree, the spec to write is unknown. A gather over these axes still happens, so
    # the warning has to name them.
    return Heads(dimensions.pop() if len(dimensions) == 1 else None, axes_of_all)


def _axes_of_heads(
    variable: VariableSpecs, heads: int, features: int, sizes: Mapping[AxisName, int]
) -> frozenset[AxisName] | None:
    """Returns the axes that shard the heads of a kernel.

    Returns None if the shape of the kernel is not that of a projection to these heads; returns no
    axes if the axes of the kernel cut through heads.

    Args:
      variable: the kernel: (…, in, heads, features) or (…, in, heads * features).
      sizes: the sizes of the axes that can shard heads.
    """
    entries = pad_entries(variable.inside, len(variable.shape))
    if len(variable.shape) > 2 and variable.shape[-2:] == (heads, features):
        axes = axes_of(entries[-2])  # (…, in, heads, features): the entry of the heads
    elif len(variable.shape) > 1 and variable.shape[-1] == heads * features:
        axes = axes_of(entries[-1])  # (…, in, heads * features)
    else:
        return None
    axes = tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
    # All axes count, or none, because they shard one dimension together.
    divides_heads = heads % math.prod(sizes[axis] for axis in axes) == 0
    return frozenset(axes if divides_heads else ())


class _GatheredOutput(NamedTuple):
    """An output of an outermost module that is gathered.

    Attributes:
      name: the expression for the module, such as ``model``.
      type_name: the name of its class.
      method: the name of the method that returned the output.
      array: the output.
      axes_text: the axes over which it is gathered, such as ``'model', 'data'``.
      sharded_spec: the spec that it would have without the gather, which the user may declare; None
        if that is not known.
      left_auto_axes: the arrays that left Auto axes in the function that calls the module. That
        function may be an inner one, such as a loss, whose declared shardings are known when it has
        returned.
      call_place: the file and line where the module is called; empty except for a cache.
      declaration: for a cache, what the user writes for ``activation_shardings``; otherwise empty.
        The caches that one method returns have the same declaration, and are in one warning.
    """

    name: str
    type_name: str
    method: str
    array: jax.Array
    axes_text: str
    sharded_spec: PartitionSpec | None
    left_auto_axes: LeftAutoAxes | None
    call_place: str = ""
    declaration: str = ""

    @property
    def is_result(self) -> bool:
        """Whether a function inside the traced one has returned it with a declared sharding."""
        left = self.left_auto_axes
        return left is not None and id(self.array) in left.declared

    def line(self, *, says_place: bool = False, says_spec: bool = True) -> str:
        """Returns a line for a warning, such as ``  model: f32[8,512], 16.0 KiB, over 'model'``.

        Args:
          says_place: whether it says where the module is called: ``, at train.py:12``.
          says_spec: whether it says what to write, if that is known: ``: write P('data')``.
        """
        # Only a warning needs `analysis`, which takes long to import.
        from ..analysis.memory import array_bytes
        from ..analysis.units import bytes_text

        size = bytes_text(array_bytes(self.array.shape, self.array.dtype))
        kind = jax.typeof(self.array).str_short(short_dtypes=True)
        place = f", at {self.call_place}" if says_place else ""
        remedy = ""
        if says_spec and self.sharded_spec is not None:
            remedy = f": write {_without_trailing(self.sharded_spec)}"
        return f"  {self.name}: {kind}, {size}, over {self.axes_text}{place}{remedy}"


class WholeOutputs:
    """The outputs that outermost modules of a trace returned with fewer axes than their columns.

    Its private attributes:

        _outputs       outputs that are gathered over axes of their columns or heads
        _last_columns  for the layer that ran last: the axes that shard its columns, by their number
        _last_shape    for the layer that ran last: the shape of its output; None if it is unknown
    """

    def __init__(self) -> None:
        """Starts with no outputs."""
        self._outputs: list[_GatheredOutput] = []
        self._last_columns: dict[int, frozenset[AxisName]] = {}
        self._last_shape: Shape | None = None

    def begin_layer(self) -> None:
        """Forgets the columns of earlier layers, because later arrays do not have them."""
        self._last_columns.clear()
        self._last_shape = None

    def end_layer(self, x: jax.Array, spec: PartitionSpec) -> None:
        """Remembers how a layer shards the columns of ``x``, its output."""
        self._last_columns = {x.shape[-1]: frozenset(spec_axes(spec))}
        self._last_shape = x.shape

    def add(
        self, frame: Frame, x: jax.Array, first_input: jax.Array, sizes: Mapping[AxisName, int]
    ) -> None:
        """Records an output of an outermost module, if it is gathered over axes of its columns.

        Args:
          frame: the call of the module.
          x: the output, typed.
          first_input: the first input, (batch, …), like which the output is typed.
          sizes: the sizes of the axes that can shard columns.
        """
        # The rank of activations: tokens (batch, length) become (batch, length, columns).
        is_tokens = jnp.issubdtype(first_input.dtype, jnp.integer)
        rank = first_input.ndim + 1 if is_tokens else first_input.ndim
        # An output with fewer dimensions has no columns: it is a value for each token, (batch,
        # length). The exception is an output that the last layer made so, such as the classes of a
        # pooled sequence, (batch, classes).
        is_of_last_layer = x.shape == self._last_shape
        has_columns = x.ndim >= (2 if is_of_last_layer else max(2, rank))
        # An output with the dimensions of the input, (batch, features), is the data, or like it.
        is_like_input = x.shape == first_input.shape[: x.ndim]
        if not has_columns or is_like_input:
            return
        output = None
        # An output with more dimensions than activations, (batch, length, features), may be a
        # cache, (batch, length, heads, features).
        if x.ndim > max(3, rank):
            output = _gathered_cache(frame, x, first_input, sizes)
        if output is None:
            output = self._gathered_columns(frame, x, sizes)
        if output is not None:  # None: nothing is gathered
            self._outputs.append(output)

    def _gathered_columns(
        self, frame: Frame, x: jax.Array, sizes: Mapping[AxisName, int]
    ) -> _GatheredOutput | None:
        """Returns an output as one whose columns are gathered; None if they are not.

        Args:
          sizes: the sizes of the axes that can shard columns.
        """
        spec = jax.typeof(x).sharding.spec
        # Two sources tell the axes: how Variables with this number of columns are sharded, and how
        # the last layer computed its columns.
        num_columns = x.shape[-1]
        axes_of_variables = column_axes(frame.module, num_columns)
        axes = axes_of_variables | self._last_columns.get(num_columns, frozenset())
        axes = axes.difference(spec_axes(spec))  # the axes in its type still shard it
        gathered_axes = sorted((axis for axis in axes if sizes.get(axis, 1) > 1), key=str)
        if not gathered_axes:
            return None
        return _GatheredOutput(
            name=frame.tag.accessor,
            type_name=type(frame.module).__name__,
            method=frame.method,
            array=x,
            axes_text=", ".join(map(repr, gathered_axes)),
            sharded_spec=PartitionSpec(*pad_entries(spec, x.ndim)[:-1], entry_of(gathered_axes)),
            left_auto_axes=LEFT_AUTO_AXES.get(),
        )

    def warn(self, transform: Sharded, result: object) -> None:
        """Warns of gathered outputs, by what the function does with them.

        An output that the function returns with a declared sharding is not gathered, so there is no
        warning. One that it returns without a declared sharding needs a declaration. One that it
        does not return is used by an operation.

        Args:
          transform: the transform of the function, with the shardings declared for its results.
          result: the result of the function.
        """
        declared, undeclared = _result_ids(transform, result)
        # The kinds of outputs to warn of: `results` are returned without a declared sharding, and
        # the others are used by operations. A cache that is a result counts as any other result.
        results, columns = list[_GatheredOutput](), list[_GatheredOutput]()
        caches: dict[str, list[_GatheredOutput]] = {}  # by the declaration that would help
        for output in self._outputs:
            if output.is_result or id(output.array) in declared:
                continue
            if id(output.array) in undeclared:
                results.append(output)
            elif output.declaration:
                caches.setdefault(output.declaration, []).append(output)
            else:
                columns.append(output)
        for declaration, of_method in caches.items():
            _warn_of_caches(transform, declaration, of_method)
        if results:
            _warn_of_results(transform, results)
        if columns:
            _warn_of_columns(transform, columns)


def _gathered_cache(
    frame: Frame, x: jax.Array, first_input: jax.Array, sizes: Mapping[AxisName, int]
) -> _GatheredOutput | None:
    """Returns an output as one whose heads are gathered; None if it has none, or they are not.

    Args:
      first_input: the first input, (batch, …).
      sizes: the sizes of the axes that can shard heads.
    """
    heads = sharded_heads(frame.module, x.shape, sizes)
    # Without heads, or if their axes still shard the output, nothing is gathered.
    if heads is None or not heads.axes.isdisjoint(spec_axes(jax.typeof(x).sharding.spec)):
        return None
    # The user writes this for ``activation_shardings``. It is also the key of the warning.
    pattern, method = exact_path(frame.tag.path), frame.method
    declaration = f"{{{pattern!r}: InOutSharding(specs, method={method!r})}}"
    return _GatheredOutput(
        name=f"{frame.tag.accessor}.{method}",
        type_name=type(frame.module).__name__,
        method=method,
        array=x,
        axes_text=", ".join(map(repr, sorted(heads.axes, key=str))),
        sharded_spec=_spec_of_cache(x, first_input, heads),
        left_auto_axes=LEFT_AUTO_AXES.get(),
        call_place=users_line(),
        declaration=declaration,
    )


def _spec_of_cache(x: jax.Array, first_input: jax.Array, heads: Heads) -> PartitionSpec | None:
    """Returns the spec with which a cache is not gathered; None if the dimension is unclear.

    Args:
      x: the cache, (…, heads, …), typed.
      first_input: the first input of the module, (batch, …).
    """
    if heads.dimension is None:
        return None
    entries = pad_entries(jax.typeof(x).sharding.spec, x.ndim)
    # A cache of stacked layers, (layers, batch, …), is not typed like the input, because its batch
    # does not come first. So the batch is found by its size, left of the heads.
    is_untyped = not any(entries)
    batch = first_input.shape[0] if first_input.ndim else None
    if is_untyped and batch in x.shape[: heads.dimension]:
        [batch_entry] = pad_entries(jax.typeof(first_input).sharding.spec, 1)
        entries[x.shape.index(batch)] = batch_entry
    entries[heads.dimension] = entry_of(sorted(heads.axes, key=str))
    return PartitionSpec(*entries)


def _warn(transform: Sharded, head: str, lines: Sequence[str], remedy: str, *, anchor: str) -> None:
    """Warns of a function, or raises an error if it is strict.

    The message is ``head``, the ``lines``, each once, and the ``remedy``. ``anchor`` is a section
    of the page on errors.
    """
    head = f"{transform.name}: on Explicit axes, {head}"
    text = message(head, [*dict.fromkeys(lines)], remedy)
    warn_or_raise(UnshardedWarning, text, strict=transform.strict, anchor=anchor)


def _warn_of_caches(transform: Sharded, declared: str, caches: Sequence[_GatheredOutput]) -> None:
    """Warns of caches that the function uses outside of modules.

    ``declared`` is the text to write for ``activation_shardings``.
    """
    _warn(
        transform,
        "new arrays that a module returns are typed like its first input, so these are gathered "
        "over axes that shard their heads:",
        [x.line(says_place=True) for x in caches],
        f"Declare them: activation_shardings={declared}, where specs is a tuple (or pytree) with a "
        "spec for each array that it returns, and a StateSharding for each module.",
        anchor="gathered-cache",
    )


def _warn_of_results(transform: Sharded, results: Sequence[_GatheredOutput]) -> None:
    """Warns of results of the function for which no spec is declared.

    On Auto axes these arrays are sharded like the columns of their module. The types that the
    function returns say that they are whole, so the compiler gathers them.
    """
    # A result that has to be whole needs the spec that is in its type now. One example is enough.
    whole_spec = _without_trailing(jax.typeof(results[0].array).sharding.spec)
    _warn(
        transform,
        "what modules return is whole in the dimensions that they shard, so these results, whose "
        "shardings are not declared, are gathered:",
        [x.line() for x in results],
        f"Declare them in {transform.out_name}: nothing is gathered then. If the first has to be "
        f"whole, write {whole_spec}.",
        anchor="gathered-result",
    )


def _warn_of_columns(transform: Sharded, outputs: Sequence[_GatheredOutput]) -> None:
    """Warns of columns that are used outside of modules; ``outputs`` are the arrays with them."""
    first = outputs[0]
    declaration: Any = _without_trailing(jax.typeof(first.array).sharding.spec)
    if first.method != "__call__":  # a spec alone is for `__call__`
        declaration = InOutSharding(declaration, method=first.method)
    # The key is the class, because a path would also be that of other models in the arguments.
    entry = f"{{{first.type_name}: {declaration!r}}}"
    _warn(
        transform,
        "operations outside of modules get whole arrays, so what these modules return is gathered "
        "over axes that shard its last dimension:",
        [x.line(says_spec=False) for x in outputs],
        "Compute what follows, such as a loss, in a method of the model: nothing is gathered "
        "then. Or use jit(..., auto_axes=True), with out_shardings. If it has to be whole, say "
        f"so: activation_shardings={entry}; of a module that returns several arrays, in a tuple "
        "for these.",
        anchor="gathered-output",
    )


def _result_ids(transform: Sharded, result: object) -> tuple[set[int], set[int]]:
    """Returns the ids of the arrays in a result: with a declared sharding, and without one.

    All results count as declared in a ``shard_map``, which does not pass shardings to JAX, because
    its specs say how results are divided, so every result has one.

    Args:
      transform: has the declared specs (``out_specs``), a prefix of the result.
      result: what the function returned: a pytree of arrays and modules.
    """
    specs = transform.out_specs.tree if transform.passes_shardings else PartitionSpec()

    def is_leaf(x: object) -> bool:
        """Whether it is one spec: None, or an ``nnx.State`` with a spec for each Variable."""
        return x is None or isinstance(x, nnx.State)

    prefix, treedef = jax.tree_util.tree_flatten(specs, is_leaf=is_leaf)
    try:
        parts = treedef.flatten_up_to(result)  # type: ignore[attr-defined]
    except ValueError:  # another structure will raise an error later, so no warning is needed
        return {id(x) for x in flatten(result).leaves}, set()
    declared, undeclared = set[int](), set[int]()
    for spec, part in zip(prefix, parts, strict=True):
        ids = undeclared if spec is None else declared
        ids.update(id(x) for x in flatten(part).leaves)
    return declared, undeclared


def _without_trailing(spec: PartitionSpec) -> PartitionSpec:
    """Returns a spec without the trailing dimensions that are not sharded: ``P("data", None)``.

    That becomes ``P("data")``, as a user would write it.
    """
    entries = [*spec.partitions]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
