"""Context parallelism: sequences over a mesh axis, without a change of the model.

Everything but attention computes each token by itself, so the compiler only needs to know that
sequences are sharded in the outputs of embeddings and of attention. While a module with attention
is called, its attribute ``attention_fn`` is replaced by one of these functions::

    method        sends in each layer              needs
    "ring"        keys and values, n - 1 times     nothing: no device ever has all keys
    "all_to_all"  everything once, less 1 / n      heads that n devices divide
    "all_gather"  keys and values, n - 1 times     memory for all keys and values of a layer

The modules of the functions have pictures, and count the bytes. ``planning.plan`` tries all three.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..errors import UnshardedWarning, message, warn_or_raise
from ..partition.optimizer import with_optimizer
from ..partition.strategies import (
    activations_of,
    base_specs,
    mesh_and_axes,
    mesh_and_axis,
    remarks_on,
)
from ..partition.variables import NamedVariable, modules_of, variables
from ..specs.activation_sharding import CallSchedule, InOutSharding
from ..specs.fitting import axes_of, pad_entries, suggestion
from ..specs.paths import Path
from ..specs.state_sharding import StateSharding
from .all_gather import all_gather_attention
from .all_to_all import all_to_all_attention
from .local_attention import AttentionFunction
from .ring import ring_attention

METHODS = {
    "ring": ring_attention,
    "all_to_all": all_to_all_attention,
    "all_gather": all_gather_attention,
}


@_compat.api_boundary
def context_parallel(
    model: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    optimizer: Any = None,
    base: StateSharding | None = None,
    axis: str | tuple[str, str] = "context",
    method: str = "ring",
    attention: AttentionFunction | None = None,
    balanced: bool = True,
    across_slices: bool = False,
) -> StateSharding:
    """Shards sequences over a mesh axis, and computes attention of them by one of three methods.

    What embeddings return, and what attention takes and returns, is sharded in its second of three
    dimensions, which is the sequence; the compiler shards the rest. Shard tokens in the same
    way, as ``P("data", "context")``: on Explicit axes, what the model returns is sharded like them.
    They keep their order, so position embeddings and RoPE need no change.

    Modules attend in this way if their attribute ``attention_fn``, as in
    ``nnx.MultiHeadAttention``, is ``nnx.dot_product_attention`` or
    ``nnx.dot_product_attention_with_rope``, or a ``functools.partial`` of one with keywords. Other
    modules have to call :func:`ring_attention`, :func:`all_to_all_attention` or
    :func:`all_gather_attention`, or the compiler gathers their keys and values. A single query, as
    in decoding, is computed as before.

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      mesh: the mesh; None for the one in context.
      optimizer: as for :func:`fsdp`.
      base: shardings to start from, which are kept, as from :func:`tensor_parallel`: attention
        then has the heads on the axes that shard them there. With its option ``sequence``, arrays
        move between that sharding of positions and this one.
        ``fsdp(model, axis=("data", "context"), base=...)`` shards parameters over both axes.
      axis: the mesh axis. For ``all_to_all``, also two of them, ``("inner", "outer")``: sequences
        are sharded as ``P(..., ("outer", "inner"))``, heads are exchanged within ``inner``, and
        keys and values go around a ring over ``outer``.
      method: ``"ring"``: keys and values go around a ring, so no device ever has all of them.
        ``"all_to_all"``: devices exchange heads for positions, which sends the least, and needs
        heads that the devices divide. ``"all_gather"``: all devices get all keys and values of a
        layer, for few key heads.
      attention: for the last two methods, the attention of each device, such as a kernel; see
        :func:`all_to_all_attention`. None for one that goes block by block.
      balanced: whether causal attention moves tokens so that all devices have equal work; see
        :func:`ring_attention`. Not needed where ``input_positions`` come from
        :func:`balanced_order`.
      across_slices: whether the axis may have devices of several TPU slices, over whose network
        keys and values are then sent.

    Returns:
      For each path the spec of ``base``, else ``P()``, with shardings of activations.

    Raises:
      ValueError: specs of ``base`` do not fit, or the axis or the method does not. In a call within
        ``jit``: what the method does not support.

    Warns:
      UnshardedWarning: no module has an ``attention_fn`` of Flax or of this package.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.experimental import context_parallel
      >>> mesh = jax.make_mesh((2, 4), ("data", "context"))
      >>> model = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
      >>> sharding = context_parallel(model, mesh=mesh, method="all_to_all")
      >>> forward = jit(lambda model, x: model(x, is_causal=True), mesh=mesh,
      ...               in_shardings=(sharding, P("data", "context")))
      >>> y = forward(model, jax.numpy.ones((4, 64, 32)))
      >>> y.sharding.shard_shape(y.shape)
      (2, 16, 32)
    """
    name = "context_parallel"
    if method not in METHODS:
        known = ", ".join(map(repr, METHODS))
        raise ValueError(f"{name}: method={method!r}{suggestion(method, METHODS)}: not in {known}.")
    if method == "ring" and attention is not None:
        raise ValueError(f"{name}: a ring adds up its blocks itself; attention= is for the others.")
    # Heads are exchanged within the inner axis. Any other tuple is refused by `mesh_and_axis`.
    if isinstance(axis, tuple) and method == "all_to_all" and len(axis) == 2:
        mesh, [inner, outer] = mesh_and_axes(name, mesh, axis, across_slices=across_slices)
        axes: Any = (outer, inner)
    else:
        mesh, axis = mesh_and_axis(name, mesh, axis, across_slices=across_slices)
        axes = axis
    _check_attention(name, model, math.prod(mesh.shape[each] for each in axes_of(axes)))
    parameters = variables(model)
    specs = base_specs(name, parameters, base, mesh)
    rest = PartitionSpec.UNCONSTRAINED  # the batch and the features, which the compiler shards
    spec = PartitionSpec(rest, axes, rest)  # (batch, sequence, features)
    options: dict[str, Any] = {"axis": axis, "balanced": balanced}
    if method != "ring":
        options |= {"attention": attention, "head_axis": _head_axes(parameters, specs)}
    # The options are a tuple, so that the schedule is hashable.
    schedule = OverSequence(axes_of(axis)[0], method, tuple(options.items()))
    sharded = InOutSharding(spec, input=spec, schedule=schedule)
    # Filters of modules: those for which the function `_attends` is true, and embeddings.
    entries = {_attends: sharded, nnx.Embed: spec}
    activations = activations_of(base).extended(entries)
    remarks = remarks_on(specs, name, base, parameters)
    return with_optimizer(specs, parameters, optimizer, activations, remarks)


def _head_axes(
    parameters: Iterable[NamedVariable], specs: Mapping[Path, PartitionSpec]
) -> tuple[str, ...]:
    """Finds the axes that shard the heads of queries, in the specs of the kernels of queries."""
    head_axes: dict[str, None] = {}  # a set in order
    for parameter in parameters:
        # (features, heads, features of a head), perhaps after dimensions of stacked layers.
        ndim = len(parameter.shape or ())
        if parameter.path[-2:] == ("query", "kernel") and ndim > 2:
            _, entry_of_heads, _ = pad_entries(specs[parameter.path], ndim)[-3:]
            head_axes |= dict.fromkeys(axes_of(entry_of_heads))
    return tuple(head_axes)


# The second function is not in all releases of Flax.
_NAMES = ("dot_product_attention", "dot_product_attention_with_rope")
_FLAX_FUNCTIONS = [getattr(nnx, name) for name in _NAMES if hasattr(nnx, name)]


def _check_attention(caller: str, model: object, num_devices: int) -> None:
    """Warns if no module of a model has attention that is computed over sharded sequences.

    A tree without modules, such as an ``nnx.State``, says nothing of attention.

    Args:
      caller: the name of the strategy, for the message.
      num_devices: the number of devices that share a sequence.
    """
    functions = [_attention_of(module)[0] for module in modules_of(model)]
    known = (*_FLAX_FUNCTIONS, *METHODS.values())
    if num_devices == 1 or not functions or any(function in known for function in functions):
        return
    warn_or_raise(
        UnshardedWarning,
        message(
            f"{caller}: no module of the model has attention that {caller} can replace, so the "
            "method has no effect.",
            [],
            "Unless modules call ring_attention, all_to_all_attention or all_gather_attention "
            "themselves, the compiler gathers all keys and values. In modules with attention, set "
            "self.attention_fn = nnx.dot_product_attention, and call that.",
        ),
        strict=False,
    )


def has_replaceable_attention(model: object) -> bool:
    """Whether a module of a model has attention that `context_parallel` replaces by its method."""
    return any(_attention_options(module) is not None for module in modules_of(model))


def _attends(_: Path, module: nnx.Module) -> bool:
    """Whether a module uses an attention function of Flax: a filter of modules."""
    return _attention_options(module) is not None


def _attention_options(module: object) -> dict[str, Any] | None:
    """Returns the keywords that a module gives to an attention function of Flax.

    The keywords are those of a ``functools.partial`` around the function; without a partial, the
    dict is empty. The result is None if the module uses no attention function of Flax.
    """
    function, keywords = _attention_of(module)
    return keywords if function in _FLAX_FUNCTIONS else None


def _attention_of(module: object) -> tuple[Any, dict[str, Any]]:
    """Returns the attribute ``attention_fn`` of a module, without a partial, and its keywords.

    The function is None if the module has no such attribute.
    """
    function: Any = vars(module).get("attention_fn")
    if type(function) is functools.partial and not function.args:
        return function.func, function.keywords
    return function, {}


@dataclasses.dataclass(frozen=True)
class OverSequence(CallSchedule):
    """Calls a module with a function of this package instead of its attention function.

    ``axis`` is that of the sequence; of two axes, it is the one within which heads are exchanged.
    The module is called itself, and nothing is reported, because attention is in no other
    attention, a model need not call all of its modules, and their other methods call ``__call__``.
    """

    method: str  # a key of ``METHODS``
    options: tuple[tuple[str, Any], ...]  # the keywords for this method: (name, value) pairs

    def wrap(
        self,
        module: Any,
        call: Callable[..., Any],
        mesh: Mesh,
        batch_axes: Iterable[Any],
        axes_of_rows: object,
        prefetch: bool,
    ) -> Callable[..., Any]:
        """Returns what is called instead of a method of the module.

        While the returned function runs, the attribute ``attention_fn`` of the module is another
        function. The parameters of this method are those of all schedules, such as of pipelines.

        Args:
          module: the module, with an attribute ``attention_fn``.
          call: its method.
          mesh: the mesh of the trace.
          batch_axes: the axes that shard the batch of the model's data.
          axes_of_rows: not used; other schedules split the rows of the batch.
          prefetch: whether parameters are gathered ahead; not used.
        """
        original, own_options = module.attention_fn, _attention_options(module) or {}
        # Keywords that the module gives to its function in a `functools.partial` come last, so they
        # override the others.
        options = {"mesh": mesh, **dict(self.options), **own_options}
        if self.method != "ring":  # in a ring, the compiler splits the batch
            # The method leaves out axes that shard the sequence, or do not divide the batch.
            batch = frozenset(batch_axes)
            options["batch_axis"] = tuple(axis for axis in mesh.axis_names if axis in batch)
        sharded: Callable[..., Any] = functools.partial(METHODS[self.method], **options)

        def attention(query: jax.Array, *args: Any, **kwargs: Any) -> Any:
            # A decoder has a single query, (…, 1, heads, features), which cannot be sharded.
            attend = original if query.shape[-3] == 1 else sharded
            return attend(query, *args, **kwargs)

        def call_sharded(*args: Any, **kwargs: Any) -> Any:
            # The attribute is set by `vars`, because Flax checks what is set in a trace.
            vars(module)["attention_fn"] = attention
            try:
                return call(*args, **kwargs)
            finally:
                vars(module)["attention_fn"] = original

        return call_sharded
