"""Context parallelism: sequences over a mesh axis, without a change of the model.

Everything but attention computes each token by itself, so the compiler needs to be told only where
sequences are sharded: in what embeddings and attention return. Attention gets ``ring_attention`` in
place of its attribute ``attention_fn``, for the duration of a call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..activations.calls import Tag
from ..partition.optimizer import with_optimizer
from ..partition.strategies import activations_of, base_specs, mesh_and_axis
from ..partition.variables import variables
from ..specs.activation_sharding import InOutSharding
from ..specs.paths import Path
from ..specs.state_sharding import StateSharding
from .ring import ring_attention


@_compat.api_boundary
def context_parallel(
    model: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    optimizer: Any = None,
    base: StateSharding | None = None,
    axis: str = "context",
    balanced: bool = True,
    across_slices: bool = False,
) -> StateSharding:
    """Shards sequences over a mesh axis, and computes attention by :func:`ring_attention`.

    What embeddings return, and what attention takes and returns, is sharded in its second of three
    dimensions, which is the sequence; the compiler shards the rest. Shard tokens in the same
    way, as ``P("data", "context")``: on Explicit axes, what the model returns is sharded like them.
    They keep their order, so position embeddings and RoPE need no change.

    Modules attend in a ring if their attribute ``attention_fn``, as in ``nnx.MultiHeadAttention``,
    is ``nnx.dot_product_attention`` or ``nnx.dot_product_attention_with_rope``, or a
    ``functools.partial`` of one with keywords. Other modules have to call :func:`ring_attention`,
    or the compiler gathers their keys and values. A single query, as in decoding, needs no ring.

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      mesh: the mesh; None for the one in context.
      optimizer: as for :func:`fsdp`.
      base: shardings to start from, which are kept, such as those of :func:`tensor_parallel`. Its
        option ``sequence`` shards the same dimension, between which and this axis arrays then move.
        ``fsdp(model, axis=("data", "context"), base=...)`` shards parameters over both axes.
      axis: the mesh axis.
      balanced: whether causal attention moves tokens so that all devices have equal work; see
        :func:`ring_attention`. Not needed where ``input_positions`` come from
        :func:`balanced_order`.
      across_slices: whether the axis may have devices of several TPU slices, over whose network
        keys and values are then sent.

    Returns:
      For each path the spec of ``base``, else ``P()``, with shardings of activations.

    Raises:
      ValueError: specs of ``base`` do not fit, or the axis does not. In a call within ``jit``: what
        :func:`ring_attention` does not support, such as dropout of weights.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.experimental import context_parallel
      >>> mesh = jax.make_mesh((2, 4), ("data", "context"))
      >>> model = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
      >>> sharding = context_parallel(model, mesh=mesh)
      >>> forward = jit(lambda model, x: model(x, is_causal=True), mesh=mesh,
      ...               in_shardings=(sharding, P("data", "context")))
      >>> y = forward(model, jax.numpy.ones((4, 64, 32)))
      >>> y.sharding.shard_shape(y.shape)
      (2, 16, 32)
    """
    mesh, axis = mesh_and_axis("context_parallel", mesh, axis, across_slices=across_slices)
    parameters = variables(model)
    specs = base_specs("context_parallel", parameters, base, mesh)
    rest = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(rest, axis, rest)
    attention = InOutSharding(spec, input=spec, schedule=_InRing(axis, balanced))
    entries = {_attends: attention, nnx.Embed: spec}
    return with_optimizer(specs, parameters, optimizer, activations_of(base).extended(entries))


# The second one is not in all releases of Flax.
_NAMES = ("dot_product_attention", "dot_product_attention_with_rope")
_FLAX_FUNCTIONS = [getattr(nnx, name) for name in _NAMES if hasattr(nnx, name)]


def _attends(_: Path, module: nnx.Module) -> bool:
    """Whether a module uses an attention function of Flax: a filter of modules."""
    return _attention_options(module) is not None


def _attention_options(module: nnx.Module) -> dict[str, Any] | None:
    """Returns the keywords that a module gives to an attention function of Flax, if it has one."""
    function: Any = vars(module).get("attention_fn")
    options = {}
    if type(function) is functools.partial and not function.args:
        function, options = function.func, function.keywords
    return options if function in _FLAX_FUNCTIONS else None


@dataclasses.dataclass(frozen=True)
class _InRing:
    """Calls a module with ``ring_attention`` in place of its attention function."""

    axis: str
    balanced: bool

    @property
    def is_running(self) -> bool:
        """False: attention is in no other attention."""
        return False

    def redirect(
        self, tag: Tag, module: nnx.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tag, nnx.Module, tuple[Any, ...]]:
        """Returns what is called: the module itself."""
        return tag, module, args

    def module_path(self, path: Path) -> Path:
        """Returns the path of the attention module itself."""
        return path

    def report_unscheduled(self, module: str) -> None:
        """Does nothing: a model need not call all of its modules."""

    def report_other_method(self, tag: Tag, method: str, args: tuple[Any, ...], out: Any) -> None:
        """Does nothing: attention is computed in ``__call__``, which other methods call."""

    def wrap(
        self,
        module: Any,
        call: Callable[..., Any],
        mesh: Mesh,
        batch_axes: Iterable[Any],
        prefetch: bool,
    ) -> Callable[..., Any]:
        """Returns what is called in place of a method of the module."""
        original, options = module.attention_fn, _attention_options(module) or {}
        in_ring: Callable[..., Any] = functools.partial(
            ring_attention, mesh=mesh, axis=self.axis, balanced=self.balanced, **options
        )

        def attention(query: jax.Array, *args: Any, **kwargs: Any) -> Any:
            # A decoder has a single query, (…, 1, heads, features): there is nothing to shard.
            is_decoding = query.shape[-3] == 1
            return (original if is_decoding else in_ring)(query, *args, **kwargs)

        def call_in_ring(*args: Any, **kwargs: Any) -> Any:
            # By `vars`, as setting an attribute of a module in a trace has checks of its own.
            vars(module)["attention_fn"] = attention
            try:
                return call(*args, **kwargs)
            finally:
                vars(module)["attention_fn"] = original

        return call_in_ring
