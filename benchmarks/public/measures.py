"""What is measured of a model: each function is a column of the page, or some of them.

Each returns what JSON can hold. What does not work raises an error, whose text is the reason.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import jit, value_and_grad
from nnx_sharding.experimental import context_parallel, expert_parallel
from nnx_sharding.partition import (
    from_metadata,
    fsdp,
    make_mesh,
    pipeline,
    planning_mesh,
    tensor_parallel,
)
from nnx_sharding.planning.memory import temporaries_needed
from nnx_sharding.report import check_sharding
from nnx_sharding.specs.state_sharding import StateSharding
from nnx_sharding.testing import assert_same

from .registry import Program, PublicModel, Size

Step: TypeAlias = Callable[[Any, Any, jax.Array], jax.Array]

# Rows of a batch: for numbers on eight devices, and for figures.
_SMALL_ROWS, _ROWS = 8, 16

# A topology of each pod, and its mesh. A v5p-8 has eight cores, in four chips.
PODS = {
    "v5e-16": ("v5e:4x4", {"data": 4, "model": 4}),
    "v5p-8": ("v5p:2x2x1", {"data": 2, "model": 2}),
}


def shares(model: PublicModel) -> Mapping[str, Any]:
    """Returns the number of parameters, and which parts the strategies shard over four devices."""
    abstract = _abstract(model.program(Size.REAL))
    result: dict[str, Any] = {}
    for name, axis, strategy in (
        ("tensor_parallel", "model", tensor_parallel),
        ("fsdp", "data", fsdp),
    ):
        mesh = AbstractMesh((4,), (axis,))
        rows = check_sharding(abstract, strategy(abstract, mesh=mesh), mesh).rows
        sizes = {row.path: math.prod(row.shape) for row in rows}
        whole = [row for row in rows if row.shape == row.shard_shape]
        total = sum(sizes.values())
        result["parameters"] = total
        result[name] = 1 - sum(sizes[row.path] for row in whole) / total
        largest = max(whole, key=lambda row: sizes[row.path], default=None)
        if largest is not None and result[name] < 0.97:
            result[f"{name} reason"] = f"{largest.path} {largest.shape}: {largest.reason}"
    return result


def same_auto(model: PublicModel) -> str:
    """Compares training by fsdp × tensor on 2 × 4 Auto devices with one device."""
    return _same_as_one_device(model, AxisType.Auto)


def same_explicit(model: PublicModel) -> str:
    """Compares it on Explicit axes."""
    return _same_as_one_device(model, AxisType.Explicit)


def _same_as_one_device(model: PublicModel, kind: AxisType) -> str:
    mesh = make_mesh({"data": 2, "model": 4}, kind)
    program = model.program(Size.SMALL)
    arguments, shardings = _arguments(program, mesh, _fsdp_and_tensor, P("data"))
    assert_same(_step(program), *arguments, shardings=shardings, mesh=mesh, steps=1)
    return "works"


def with_pipeline(model: PublicModel) -> str:
    """Compares training in a pipeline of two stages, with fsdp over two devices."""
    mesh = make_mesh({"data": 2, "stage": 2}, AxisType.Auto, devices=jax.devices()[:4])

    rows = model.rows

    def strategy(model: Any, **options: Any) -> StateSharding:
        base = pipeline(model, microbatches=2, rows=rows, **options)
        return fsdp(model, base=base, min_size=0, **options)

    return _compare(model.program(Size.SMALL), mesh, strategy, P("data"))


def with_context(model: PublicModel) -> str:
    """Compares training with sequences sharded over four devices."""
    if not model.sequences:
        return "no sequences of tokens"
    mesh = make_mesh({"data": 2, "context": 4}, AxisType.Auto)

    def strategy(model: Any, **options: Any) -> StateSharding:
        return context_parallel(model, base=fsdp(model, min_size=0, **options), **options)

    _compare(model.program(Size.SMALL), mesh, strategy, P("data", "context"))
    abstract = _abstract(model.program(Size.SMALL))
    attends = any(
        hasattr(node, "attention_fn") for _, node in nnx.iter_graph(abstract) if node is not None
    )
    return "works" if attends else "works; keys and values are gathered"


def with_experts(model: PublicModel) -> str:
    """Compares training with experts over four devices."""
    mesh = make_mesh({"data": 2, "expert": 4}, AxisType.Auto)

    def strategy(model: Any, **options: Any) -> StateSharding:
        return fsdp(model, base=expert_parallel(model, **options), min_size=0, **options)

    try:
        return _compare(model.program(Size.SMALL), mesh, strategy, P(("data", "expert")))
    except ValueError as error:
        if "the number of experts is not known" in str(error):
            return "no experts"
        raise


def bytes_sent(model: PublicModel) -> Mapping[str, int]:
    """Returns the bytes that a device sends in a step of two layers of the real widths.

    Once with fsdp × tensor on 2 × 4, and with the shardings that the authors wrote, if any.
    """
    program = model.program(Size.WIDE)
    mesh = make_mesh({"fsdp": 2, "tp": 4}, AxisType.Auto)

    def ours(model: Any, **options: Any) -> StateSharding:
        base = tensor_parallel(model, axis="tp", **options)
        return fsdp(model, axis="fsdp", base=base, **options)

    result = {"ours": _bytes_of(program.make, program, mesh, ours)}
    if program.annotated is not None:
        result["authors"] = _bytes_of(program.annotated, program, mesh, _declared)
    return result


def _bytes_of(
    make: Callable[[nnx.Rngs], Any],
    program: Program,
    mesh: Any,
    strategy: Callable[..., Any],
) -> int:
    lowered = _lower(make, program, mesh, strategy, P("fsdp"))
    # The code is not run, and what is sent is decided before it is made.
    compiled = lowered.compile({"xla_backend_optimization_level": 0})
    return compiled.collectives().bytes_sent


def memory(model: PublicModel) -> Mapping[str, Any]:
    """Returns the bytes that a step of the real size needs on each chip of the pods.

    All layers are compiled by the TPU compiler. If they need more than a chip has, the compiler has
    tried to compute activations again, and its error says how much is still needed.
    """
    program = model.program(Size.REAL)
    result: dict[str, Any] = {}
    for name, (topology, sizes) in PODS.items():
        kinds = (AxisType.Auto,) * len(sizes)
        axes = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
        mesh = planning_mesh(topology, axes)
        try:
            lowered = _lower(program.make, program, mesh, _fsdp_and_tensor, P("data"))
            result[name] = {"bytes": lowered.compile().memory().peak, "fits": True}
        except Exception as error:
            needed = temporaries_needed(str(error))
            result[name] = {"bytes": needed, "fits": False} if needed else reason(error)
    return result


def reason(error: BaseException) -> str:
    """Returns the beginning of an error, without line breaks."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" …")


MEASURES: Mapping[str, Callable[[PublicModel], Any]] = {
    "shares": shares,
    "Auto": same_auto,
    "Explicit": same_explicit,
    "pipeline": with_pipeline,
    "context": with_context,
    "experts": with_experts,
    "bytes": bytes_sent,
    "memory": memory,
    "optimized": memory,
}


def _abstract(program: Program) -> Any:
    return nnx.eval_shape(lambda: program.make(nnx.Rngs(0)))


def _fsdp_and_tensor(model: Any, **options: Any) -> StateSharding:
    return fsdp(model, base=tensor_parallel(model, **options), min_size=0, **options)


def _declared(model: Any, *, mesh: Any, optimizer: Any) -> tuple[StateSharding, StateSharding]:
    """Returns the shardings in the metadata of the Variables, which the authors wrote."""
    return from_metadata(model, mesh=mesh), from_metadata(optimizer, mesh=mesh)


def _step(program: Program) -> Step:
    return _step_of(value_and_grad(program.loss))


def _plain_step(program: Program) -> Step:
    return _step_of(nnx.value_and_grad(program.loss))


def _step_of(gradient: Callable[[Any, jax.Array], Any]) -> Step:
    def train(model: Any, optimizer: Any, batch: jax.Array) -> jax.Array:
        loss, grads = gradient(model, batch)
        optimizer.update(model, grads)
        return loss

    return train


def _batch(program: Program) -> jax.Array:
    """Returns a batch of random rows, or tokens."""
    shape, dtype = (_SMALL_ROWS, *program.example.shape), program.example.dtype
    random = np.random.default_rng(0)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(random.integers(1, 64, shape), dtype)
    return jnp.asarray(random.normal(size=shape), dtype)


def _arguments(
    program: Program, mesh: Any, strategy: Callable[..., Any], spec: P
) -> tuple[tuple[Any, Any, jax.Array], tuple[Any, Any, P]]:
    """Returns a model, its optimizer and a batch, and their shardings."""
    model = program.make(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.01, momentum=0.9), wrt=nnx.Param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters that are small here only
        sharding = strategy(model, mesh=mesh, optimizer=optimizer)
    return (model, optimizer, _batch(program)), (sharding, sharding, spec)


def _compare(program: Program, mesh: Any, strategy: Callable[..., Any], spec: P) -> str:
    """Trains two steps on a mesh, and with ``nnx.jit`` on one device; fails if numbers differ."""
    arguments, shardings = _arguments(program, mesh, strategy, spec)
    expected = program.make(nnx.Rngs(0))
    optimizer = nnx.Optimizer(expected, optax.sgd(0.01, momentum=0.9), wrt=nnx.Param)
    on_mesh = jit(_step(program), in_shardings=shardings, mesh=mesh)
    on_device = nnx.jit(_plain_step(program))
    for _ in range(2):
        loss, truth = on_mesh(*arguments), on_device(expected, optimizer, arguments[-1])
        np.testing.assert_allclose(loss, truth, rtol=1e-4)
    trained, truths = (jax.tree.leaves(nnx.state(x, nnx.Param)) for x in (arguments[0], expected))
    for array, truth in zip(trained, truths, strict=True):
        np.testing.assert_allclose(array, truth, rtol=1e-3, atol=1e-5)
    return "works"


def _lower(
    make: Callable[[nnx.Rngs], Any],
    program: Program,
    mesh: Any,
    strategy: Callable[..., Any],
    spec: P,
) -> Any:
    """Lowers a step with AdamW, of abstract arrays."""

    def both() -> tuple[Any, Any]:
        model = make(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(both)
    sharding = strategy(model, mesh=mesh, optimizer=optimizer)
    of_model, of_optimizer = sharding if isinstance(sharding, tuple) else (sharding, sharding)
    batch = jax.ShapeDtypeStruct((_ROWS, *program.example.shape), program.example.dtype)
    shardings = (of_model, of_optimizer, spec)
    step = jit(_step(program), in_shardings=shardings, mesh=mesh, donate_argnums=(0, 1))
    return step.lower(model, optimizer, batch)
