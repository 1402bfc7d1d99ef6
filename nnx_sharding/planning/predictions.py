"""Predicts what candidates need from shapes and one trace of the step, before any is compiled.

**Memory** is the bytes of the arguments, exact except for the padding of tiles. **Compute** is the
matrix products and convolutions in the jaxpr of the step. **Bytes sent** is a rough estimate of
what one device sends in a training step. Let b be the bytes of a parameter, divided by the sizes of
the axes that shard it during the whole step (`model`, `stage`, `expert`). Let s be the number of
shards of the parameter over axes of the batch, and n the number of devices along these axes:

    parameter in shards       3 b (1 - 1/s)            gathered twice, its gradient scattered
    replicas of the shards    2 b/s (1 - s/n)          all-reduce of the gradient's shards
    tensor parallelism        tokens × features × …    activations on both sides of a kernel
    experts                   tokens × features × …    tokens go to two experts and back
    pipeline                  tokens × features × …    activations go to the next stage in each
                                                       tick, and their gradients come back
    context                   tokens × features × …    keys and values, or heads for positions,
                                                       both ways: `CONTEXT_ROUNDS`

If a step accumulates the gradients of microbatches, the first two rows count once per microbatch
for parameters that are sharded over the batch. In a pipeline, the first two rows count once per
tick for the parameters of a stage, because each tick uses them. With 1F1B, parameters that are not
sharded over the batch are an exception: the stage adds up their gradients and reduces them once. If
layers are blocks of a list, blocks also move to their stages, and their gradients back.

Gradients are reduced within slices first, then between slices. What stages send goes over the
slower network if there are different slices along the axis for stages. The number of features that
go between stages, and for attention, is taken to be the number of elements of the smallest
parameter of a layer, for example the scale of a norm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..analysis.flops import elements_in_windows
from ..analysis.hardware import Hardware
from ..analysis.memory import array_bytes
from ..experimental.context import OverSequence
from ..partition.mesh import make_mesh
from ..partition.pipeline_schedule import Schedule
from ..partition.variables import listing_of
from ..report.sharding import ShardingRow, sharding_rows
from ..specs.fitting import axes_of, pad_entries, spec_and_mesh
from ..specs.state_sharding import StateSharding
from ..transforms.jit import jit
from .arguments import Arguments
from .axes import SHARDING, Axes
from .candidates import Candidate
from .chains import split_name


class Products(NamedTuple):
    """The matrix products and convolutions of a step, on all devices together."""

    flops: float = 0.0  # floating-point operations, with the largest branch of each conditional
    accessed: float = 0.0  # bytes of operands and results, with the same branches
    least: float = 0.0  # floating-point operations, with the smallest branch of each conditional
    # Whether any product has 8-bit operands, for which the peak rate may be higher.
    is_narrow: bool = False

    def times(self, count: float) -> Products:
        """Returns the products of ``count`` runs."""
        return Products(
            self.flops * count, self.accessed * count, self.least * count, self.is_narrow
        )

    def least_seconds(self, devices: int, hardware: Hardware) -> float:
        """Returns a lower bound of a step's time: its products at the peak rate of all devices."""
        rates: list[float | None] = [hardware.flops]
        # The bound is valid only if all products count as narrow where some of them are.
        if self.is_narrow:
            rates += [hardware.int8_flops, hardware.fp8_flops]
        return self.least / devices / max(filter(None, rates))


def products_of(
    fun: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any], axes: Axes
) -> Products | None:
    """Traces a step for one device and counts the products whose results are used.

    Args:
      fun: the step.
      args: its arguments.
      options: the options of ``jit``.
      axes: the names of mesh axes by their roles. The step may name all of these axes.

    Returns:
      The products; None if the step cannot be traced for one device.
    """
    sizes = {name: 1 for names in axes for name in names}  # one device along each axis
    # A step may be written for axes of one type only, so the second type is tried, too.
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = make_mesh(sizes, kind, devices=jax.devices()[:1])
        try:
            with jax.set_mesh(mesh):
                traced = jit(fun, mesh=mesh, **options).trace(*args)
                # The compiler drops equations whose results are not used, so they do not count.
                return products_in(_compat.used_equations(traced._stage.jaxpr))
        # The step may need several devices. An error of the step itself is not lost, because
        # lowering the candidates raises it again.
        except Exception:
            continue
    return None


def products_in(equations: Iterable[JaxprEqn]) -> Products:
    """Sums the products of equations and of the jaxprs in them.

    The body of a ``scan`` counts for each iteration. The body of a ``while`` loop counts once,
    because the number of iterations is unknown. All other operations are left out, because products
    dominate the time of a model.
    """
    summands = list[Products]()
    for equation in equations:
        own_products = _own_products(equation)  # None for other operations
        if own_products is not None:
            summands.append(own_products)
            continue
        name = equation.primitive.name
        # `jaxprs_of` yields the jaxprs in the parameters: a body, or the branches of a `cond`.
        called = [products_in(jaxpr.eqns) for jaxpr in _compat.jaxprs_of(equation)]
        if called and name == "cond":  # one of the branches runs
            largest = max(called, key=lambda branch: branch.flops)
            called = [largest._replace(least=min(branch.least for branch in called))]
        if name == "while":  # the body may run zero times
            called = [body._replace(least=0.0) for body in called]
        num_runs = equation.params.get("length", 1)  # only a scan has this parameter
        summands += [body.times(num_runs) for body in called]
    return Products(
        flops=sum(products.flops for products in summands),
        accessed=sum(products.accessed for products in summands),
        least=sum(products.least for products in summands),
        is_narrow=any(products.is_narrow for products in summands),
    )


def _own_products(equation: JaxprEqn) -> Products | None:
    """Returns the products of a matrix product or a convolution; None for any other equation."""
    operands: list[Any] = [x.aval for x in equation.invars]
    results: list[Any] = [x.aval for x in equation.outvars]
    arrays = [*operands, *results]
    flops = _product_flops(equation.primitive.name, equation.params, arrays)
    if flops == 0:
        return None
    return Products(
        flops=flops,
        # A value without a shape is no array, such as a token of effects.
        accessed=sum(array_bytes(x.shape, x.dtype) for x in arrays if hasattr(x, "shape")),
        least=flops,
        # The first two operands are the factors; further ones are sizes of groups.
        is_narrow=all(array.dtype.itemsize == 1 for array in operands[:2]),
    )


def _product_flops(name: str, params: Mapping[str, Any], arrays: Sequence[Any]) -> float:
    """Counts the flops of a product or convolution; returns 0 for other primitives.

    Args:
      arrays: the avals of the operands, then the aval of the result.
    """
    if name == "dot_general":
        lhs, *_, result = arrays
        (contracting, _), _ = params["dimension_numbers"]  # the dimensions of lhs
        contracted = float(math.prod(lhs.shape[dimension] for dimension in contracting))
        return float(2 * math.prod(result.shape) * contracted)
    if name == "conv_general_dilated":
        return _convolution_flops(params, *(array.shape for array in arrays))
    if name.startswith("ragged_dot"):
        lhs, _, group_sizes, *_, result = arrays
        numbers = params["ragged_dot_dimension_numbers"]
        (contracting, _), _ = numbers.dot_dimension_numbers  # the dimensions of lhs
        contracted = float(math.prod(lhs.shape[dimension] for dimension in contracting))
        # If groups divide the rows of lhs, each row is multiplied with the matrix of its group, so
        # the flops are those of `dot_general`. If groups divide the contracted dimension, the
        # result has one matrix for each group, which is a sum over the part of this group only.
        if {*numbers.lhs_ragged_dimensions} <= {*contracting}:
            contracted /= group_sizes.shape[-1]
        return float(2 * math.prod(result.shape) * contracted)
    return 0.0


def _convolution_flops(
    params: Mapping[str, Any], lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]
) -> float:
    """Counts the flops of a convolution, from its parameters and the shapes of its arrays.

    Products with padding, and with the zeros of a dilated input, do not count.
    """
    # Each spec lists the dimensions of an array. Input and result: (batch, features, *spatial);
    # kernel: (outputs, inputs, *spatial).
    numbers = params["dimension_numbers"]
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    # The kernel has the inputs of one group; the input has the features of all groups.
    products = batch * features * rhs[numbers.rhs_spec[1]]
    for i, stride in enumerate(params["window_strides"]):
        # `in_window` has the number of elements of the input in the window of each output.
        in_window = elements_in_windows(
            size=lhs[numbers.lhs_spec[i + 2]],
            kernel=rhs[numbers.rhs_spec[i + 2]],
            outputs=out[numbers.out_spec[i + 2]],
            stride=stride,
            low=params["padding"][i][0],
            dilation=params["lhs_dilation"][i],
            spacing=params["rhs_dilation"][i],
        )
        products *= int(in_window.sum())
    return float(2 * products)


class Prediction(NamedTuple):
    """What a candidate needs on one device."""

    arguments: int  # bytes, without the padding of tiles
    sent_within: float  # bytes that a device sends within slices in a step
    sent_between: float  # bytes that a device sends between slices in a step
    # The factor by which stages of a pipeline that wait make a step longer: 1.5 for a step that
    # takes 1.5 times as long.
    slowdown: float
    key: Any  # a value that is equal for candidates that shard everything alike
    rows: int  # rows of the batch on one device; 0 without a batch

    def seconds(
        self, products: Products | None, devices: int, hardware: Hardware
    ) -> dict[str, float]:
        """Predicts the seconds that each resource alone takes in a step, by its name.

        A step takes as long as the largest of these if all of it overlaps.

        Args:
          products: the products of the step, on all devices together; None if they are unknown.
          devices: the number of devices.
          hardware: the rates.
        """
        products = products or Products()
        seconds_within_slices = self.sent_within / hardware.interconnect_bandwidth
        # A step reads and writes its arguments once.
        accessed = 2 * self.arguments + products.accessed / devices
        return {
            "compute": products.flops / devices * self.slowdown / hardware.flops,
            "memory": accessed / hardware.memory_bandwidth,
            # The two networks can be used at the same time, so the slower one counts.
            "interconnect": max(seconds_within_slices, self.seconds_between_slices(hardware)),
        }

    def seconds_between_slices(self, hardware: Hardware) -> float:
        """Predicts the seconds for what slices send to each other."""
        bandwidth = hardware.network_bandwidth or hardware.interconnect_bandwidth
        return self.sent_between / bandwidth


def predict(
    candidate: Candidate,
    arguments: Arguments,
    axes: Axes,
    num_slices: int = 1,
    microbatches: int = 1,
) -> Prediction:
    """Predicts what a candidate needs on one device.

    Args:
      candidate: the candidate, with its shardings.
      arguments: the arguments of the step.
      axes: the names of mesh axes by their roles.
      num_slices: the number of slices of TPUs that the devices are on.
      microbatches: the number of microbatches whose gradients the step accumulates.

    Raises:
      ValueError: a spec does not fit the array that it is for.
    """
    sums = _Sums(candidate, arguments, axes, num_slices, microbatches)

    def is_single(sharding: Any) -> bool:
        """Tells whether a sharding is a leaf, although JAX may take it for a pytree."""
        return sharding is None or isinstance(sharding, StateSharding)

    # `add` gets each sharding with its argument, or with the part of an argument that it is for.
    jax.tree.map(sums.add, candidate.in_shardings, arguments.args, is_leaf=is_single)
    schedule = sums.schedule
    return Prediction(
        arguments=sums.bytes,
        sent_within=sums.sent_within,
        sent_between=sums.sent_between,
        slowdown=1.0 if schedule is None else schedule.ticks / schedule.microbatches,
        key=tuple(sums.key),
        rows=sums.rows,
    )


class _Sums:
    """Sums what a candidate needs over all arguments, by the formulas at the top of this file.

    A *row* (`ShardingRow`) describes one array of a module: its ``path``, ``shape``, ``spec``,
    ``bytes_total`` and ``bytes_per_device``.

    Attributes:
      arguments: the arguments of the step, with what is known of their batch and models.
      axes: the names of mesh axes by their roles.
      styles: the styles for layers of the candidate's strategy, such as ``tensor``.
      mesh: a mesh of the candidate's sizes, without devices.
      bytes: the bytes of the added arguments on one device.
      sent_within: the bytes that one device sends within slices, for the added arguments.
      sent_between: the bytes that one device sends between slices, for the added arguments.
      key: the sizes of the mesh; then, for each added array, the axes that shard it and the kind of
        its memory. Candidates with equal keys compile to equal programs, so one of them is enough.
      sizes: name → size, for the mesh axes with more than one device.
      crossing: the mesh axes along which there are different slices.
      rows: the rows of the batch on one device, by the added arrays; 0 without rows.
      tokens: the tokens of the batch on one device.
      microbatches: the number of microbatches whose gradients the step accumulates.
      schedule: the schedule of a pipeline in the added models; None without a pipeline.
    """

    def __init__(
        self,
        candidate: Candidate,
        arguments: Arguments,
        axes: Axes,
        num_slices: int,
        microbatches: int,
    ):
        """Starts with sums of nothing; `predict` has the same arguments."""
        self.arguments, self.axes, self.microbatches = arguments, axes, microbatches
        _, self.styles = split_name(candidate.strategy)
        names, sizes = zip(*candidate.sizes.items(), strict=True)
        # Shapes of shards do not depend on devices, so the mesh has none.
        self.mesh = AbstractMesh(sizes, names, (AxisType.Auto,) * len(names))
        self.sizes = {axis: size for axis, size in candidate.sizes.items() if size > 1}
        self.crossing = axes.between_slices(candidate.mesh, num_slices)
        self.bytes, self.sent_within, self.sent_between, self.rows = 0, 0.0, 0.0, 0
        self.schedule: Schedule | None = None
        self.key: list[Any] = [tuple(self.sizes.items())]
        # Each of these axes divides either the rows or the positions of the batch.
        self.tokens = arguments.tokens / self._num_devices("replica", *SHARDING)

    def _num_devices(self, *roles: str) -> int:
        """Returns the number of devices along the axes of these roles."""
        return self._product(self.axes.in_mesh(self.sizes, *roles))

    def _product(self, axes: Iterable[str]) -> int:
        """Returns the product of the sizes of axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def add(self, sharding: StateSharding | Sharding | PartitionSpec | None, part: Any) -> None:
        """Adds an argument, or a part of an argument that has its own sharding, to all sums.

        Args:
          sharding: the sharding of ``part``; None replicates it.
          part: a module or an optimizer with a `StateSharding`, or else a pytree of arrays.

        Raises:
          ValueError: a spec does not fit the array that it is for.
        """
        if not isinstance(sharding, StateSharding):
            self._add_arrays(sharding, part)
            return
        rows = sharding_rows(listing_of(part).flat, sharding, self.mesh)
        faults = [f"{row.path}: {row.why}" for row in rows if row.is_fault]
        if faults:
            raise ValueError("these specs do not fit: " + "; ".join(faults))
        self.bytes += sum(row.bytes_per_device for row in rows if not _is_on_host(row))
        self.key.append(tuple((*self._axes_of_row(row), row.memory_kind) for row in rows))
        # Candidates may differ in the shardings of activations only.
        self.key.append(sharding.activations)
        # Devices update the state of an optimizer where it is, so they send nothing for it.
        if isinstance(part, nnx.Optimizer):
            return
        self._add_layers(sharding, rows)  # sets `schedule`, so this call is before the loop
        for row in rows:
            self._add_parameter(row)

    def _add_arrays(self, sharding: Sharding | PartitionSpec | None, part: Any) -> None:
        """Adds the memory of arrays outside of modules, such as the batch; they are not sent."""
        pair = spec_and_mesh(sharding, self.mesh)
        spec, mesh = (PartitionSpec(), self.mesh) if pair is None else pair
        is_on_host = _is_on_host(sharding)
        for array in jax.tree.leaves(part):
            if hasattr(array, "shape"):
                shape = NamedSharding(mesh, spec).shard_shape(array.shape)
                if array.shape and array.shape[0] == self.arguments.rows:
                    # A function of the user may divide arrays of the batch differently.
                    self.rows = min(shape[0], self.rows or shape[0])
                self.key.append((*self._axes_by_dimension(spec, shape), is_on_host))
                if not is_on_host:
                    self.bytes += array_bytes(shape, array.dtype)

    def _add_layers(self, sharding: StateSharding, rows: Sequence[ShardingRow]) -> None:
        """Adds what goes from layer to layer in a pipeline, and for attention over a sequence.

        Args:
          sharding: the sharding of a model. It declares how modules run: the ``schedule`` of a
            declaration is the schedule of a pipeline, or says how attention exchanges positions
            (`OverSequence`), or is None.
          rows: the rows of the parameters of the model.
        """
        declared = sharding.activations.shardings if sharding.activations else ()
        schedules = [declaration.schedule for declaration in declared]
        pipeline = next((x for x in schedules if isinstance(x, Schedule)), None)
        # `bytes_in_layer` has the bytes of each parameter in one layer.
        in_stacks = [row for row in rows if row.shape[:1] and row.shape[0] in self.arguments.layers]
        bytes_in_layer = [row.bytes_total / row.shape[0] for row in in_stacks]
        block_bytes = 0.0
        if pipeline is not None and not in_stacks:
            # The layers are blocks of a list, and each block has its own parameters. These are the
            # parameters that the pipeline shards over stages. In a step, blocks first move to the
            # stages that run them. Layers of a stack need not move: each stage holds its layers.
            stages = {*self.axes.in_mesh(self.sizes, "stage")}
            for row in rows:
                if not stages.isdisjoint(itertools.chain(*self._axes_of_row(row))):
                    bytes_in_layer.append(row.bytes_total)
            block_bytes = sum(bytes_in_layer)
        # The bytes of a token between two layers are taken to be the bytes of the smallest
        # parameter of a layer, for example the scale of a norm.
        per_token = min(bytes_in_layer, default=0.0)
        if pipeline is not None:
            self.schedule = pipeline
            self._add_stages(pipeline, per_token, block_bytes)
        # If no method is declared, keys and values are taken to go around a ring.
        method = next((x.method for x in schedules if isinstance(x, OverSequence)), "ring")
        self._add_contexts(method, per_token)

    def _add_stages(self, schedule: Schedule, per_token: float, block_bytes: float) -> None:
        """Adds what the stages of a pipeline send each other.

        Args:
          per_token: the bytes of a token between two layers.
          block_bytes: the bytes of the parameters of all blocks of a list. Each array is divided
            over the stages, and gathered on the stage that runs its block. 0 for a stack.
        """
        # A stage runs ``1 / stages`` of the blocks. It holds ``1 / stages`` of each array of these
        # blocks, and gets the remaining parts from the other stages.
        blocks_of_stage = block_bytes / schedule.stages
        gathered = blocks_of_stage * (1 - 1 / schedule.stages)
        # A microbatch goes to the next stage in each tick, even while the stage waits. At the end,
        # the last stage sends the results of the whole batch to all stages.
        batch_bytes = self.tokens * per_token
        microbatch_bytes = batch_bytes / schedule.microbatches
        activations = schedule.ticks * microbatch_bytes + batch_bytes
        # The backward pass sends as many bytes of gradients in the other direction.
        sent = 2 * (gathered + activations)
        if {*self.axes.in_mesh(self.sizes, "stage")} & self.crossing:
            self.sent_between += sent
        else:
            self.sent_within += sent

    def _add_contexts(self, method: str, per_token: float) -> None:
        """Adds what attention over a sharded sequence sends.

        Args:
          method: how attention exchanges keys and values, a key of `CONTEXT_ROUNDS`.
          per_token: the bytes of a token between two layers.
        """
        devices = self._num_devices("context")
        if devices == 1:
            return
        layers = max(self.arguments.layers, default=0)  # the length of the longest stack
        rounds = CONTEXT_ROUNDS[method](devices)
        # With all_to_all over one axis, a ring may run over another axis. A ring of one device has
        # no rounds.
        rounds += CONTEXT_ROUNDS["ring"](self._num_devices("ring"))
        # A round sends two arrays, the keys and the values of all tokens.
        keys_and_values = 2 * self.tokens * per_token
        self.sent_within += keys_and_values * rounds * layers

    def _axes_of_row(self, row: ShardingRow) -> tuple[tuple[str, ...], ...]:
        """Lists the axes that shard each dimension of a row, without axes of size 1."""
        spec = row.spec if isinstance(row.spec, PartitionSpec) else PartitionSpec()
        return self._axes_by_dimension(spec, row.shape)

    def _axes_by_dimension(
        self, spec: PartitionSpec, shape: Sequence[int]
    ) -> tuple[tuple[str, ...], ...]:
        """Lists the axes of a spec for each dimension of a shape, without axes of size 1."""
        entries = pad_entries(spec, len(shape))
        return tuple(tuple(axis for axis in axes_of(x) if axis in self.sizes) for x in entries)

    def _add_parameter(self, row: ShardingRow) -> None:
        """Adds what is sent for one parameter, and for the activations around a kernel.

        The formulas at the top of this file call ``held`` b, ``shards`` s and ``devices`` n.
        """
        # Only floats have gradients, and the gradient of a scalar hardly counts.
        if "float" not in row.dtype or not row.shape:
            return
        axes_of_dims = self._axes_of_row(row)
        sharding_axes = {axis for axes in axes_of_dims for axis in axes}
        # `expert`, `stage` and `model` are the axes that shard the parameter during the whole step.
        expert = self._axes_over_experts(row.shape, axes_of_dims)
        stage = {*self.axes.stage} & sharding_axes
        model = {*self.axes.model} & sharding_axes
        held: float = row.bytes_total / self._product(expert | stage | model)
        # Devices along the axes `data` use the same parameter for different tokens. They gather the
        # parameter and reduce its gradient, within slices first. Between slices, only the shards
        # that are left are sent.
        data = {*self.axes.in_mesh(self.sizes, "replica", *SHARDING)} - expert
        sent = list[float]()  # bytes within slices, bytes between slices
        for level in (data - self.crossing, data & self.crossing):
            shards, devices = self._product(level & sharding_axes), self._product(level)
            gathers_and_scatter = 3 * held * (1 - 1 / shards)
            all_reduce = 2 * held / shards * (1 - shards / devices)
            sent.append(gathers_and_scatter + all_reduce)
            held /= shards
        within, between = sent
        times_in_step = 1
        if self.schedule is not None and stage:
            # Each tick uses the layers of a stage. But 1F1B (``interleaves``) adds up the gradients
            # of parameters that are not sharded over `data`, and reduces them once.
            is_reduced_once = self.schedule.interleaves and data.isdisjoint(sharding_axes)
            times_in_step = 1 if is_reduced_once else self.schedule.ticks
        if not data.isdisjoint(sharding_axes):
            # Each microbatch gathers its parameters and reduces their gradients. The gradients of
            # parameters that are not sharded are added up and reduced once for the batch.
            times_in_step *= self.microbatches
        self.sent_within += times_in_step * within
        self.sent_between += times_in_step * between
        if len(row.shape) > 1 and (expert or model):
            self._add_activations(
                row,
                axes_of_dims,
                expert=expert,
                model=model,
                num_stages=self._product(stage),
            )

    def _axes_over_experts(
        self, shape: Sequence[int], axes_of_dims: Sequence[tuple[str, ...]]
    ) -> set[str]:
        """Returns the axes for experts that shard the dimension of experts of a parameter.

        The set is empty for other parameters, although an axis for experts may shard them: it does
        so in the way of an axis for data.

        Args:
          shape: the shape of the parameter.
          axes_of_dims: the axes that shard each dimension of it.
        """
        over_experts: set[str] = set()
        if "expert" in self.styles:
            for size, axes in zip(shape, axes_of_dims, strict=True):
                if size == self.arguments.experts:
                    over_experts.update(axis for axis in axes if axis in self.axes.expert)
        return over_experts

    def _add_activations(
        self,
        row: ShardingRow,
        axes_of_dims: Sequence[tuple[str, ...]],
        *,
        expert: set[str],
        model: set[str],
        num_stages: int,
    ) -> None:
        """Adds the activations that devices exchange because a kernel is sharded over them.

        Args:
          row: the kernel, or a stack of kernels: (layers, *kernel).
          axes_of_dims: the axes that shard each dimension of ``row``.
          expert: the axes for experts that shard it. If there are some, tokens go to the experts.
          model: the axes for tensor parallelism that shard it.
          num_stages: the number of stages that the stack is divided over.
        """
        kernel, axes_of_kernel, layers = row.shape, axes_of_dims, 1.0
        # If the row is a stack, each stage runs its part of the layers.
        if row.shape[0] in self.arguments.layers:
            kernel, axes_of_kernel = row.shape[1:], axes_of_dims[1:]
            layers = row.shape[0] / num_stages
        if expert:
            elements = _elements_to_experts(kernel)
            num_devices = self._product(expert)
        else:
            elements = _elements_in_all_reduce(kernel, axes_of_kernel, model)
            num_devices = self._product(model)
        element_bytes = row.bytes_total / math.prod(row.shape)
        bytes_per_token = layers * element_bytes * elements
        to_others = 1 - 1 / num_devices  # the rest stays on the device
        self.sent_within += self.tokens * bytes_per_token * to_others


# The model is taken to be a usual mixture of experts: each token goes to two experts, and an expert
# is a gated MLP with the kernels "gate", "up" and "down".
_EXPERTS_PER_TOKEN = 2
_KERNELS_PER_EXPERT = 3


def _elements_to_experts(kernel: Sequence[int]) -> float:
    """Counts the elements that a token sends in a step, for one kernel of its experts.

    A token goes to its experts and comes back, in the forward and in the backward pass. The three
    kernels of an expert share this traffic, so each kernel counts a third of it.

    Args:
      kernel: the shape (experts, in, out). The smaller number of in and out is taken for the width
        of a token. The larger number is the hidden width of an expert, and is not sent.
    """
    width = min(kernel[-2:])
    there_and_back, forward_and_backward = 2, 2
    times_sent = _EXPERTS_PER_TOKEN * there_and_back * forward_and_backward
    return times_sent / _KERNELS_PER_EXPERT * width


def _elements_in_all_reduce(
    kernel: Sequence[int], axes_of_kernel: Sequence[tuple[str, ...]], model: set[str]
) -> float:
    """Counts the elements that a token sends in a step, for a kernel with tensor parallelism.

    If the kernel (in, out) is sharded along ``in``, its outputs are partial sums, and the forward
    pass all-reduces them. If the kernel is sharded along ``out``, the gradients of its inputs are
    partial sums, and the backward pass all-reduces them. So the dimension that is not sharded is
    the number of elements that are sent.

    Args:
      kernel: the shape of the kernel. There may be several dimensions of inputs or outputs, such as
        (width, heads, head_dim) with sharded heads. Then the largest unsharded dimension counts.
      axes_of_kernel: the axes that shard each dimension of the kernel.
    """
    unsharded = [
        size for size, axes in zip(kernel, axes_of_kernel, strict=True) if model.isdisjoint(axes)
    ]
    return 2 * max(unsharded, default=1)  # an all-reduce sends what it sums twice


def _is_on_host(sharding: Any) -> bool:
    """Tells whether a sharding, or a row, is for the memory of the host."""
    return "host" in (getattr(sharding, "memory_kind", None) or "")


# Method of attention → a function of the number of devices. It returns how often a device sends as
# many bytes as the keys and values have, in one step.
CONTEXT_ROUNDS: dict[str, Callable[[int], float]] = {
    # Keys and values in the forward pass; in the backward pass, them again and their gradients.
    "ring": lambda devices: 3 * (devices - 1),
    # Queries, keys, values and outputs, twice the bytes of keys and values; and all gradients.
    "all_to_all": lambda devices: 2 * 2 * (1 - 1 / devices),
    # Keys and values in the forward pass, and their gradients in the backward pass.
    "all_gather": lambda devices: 2 * (devices - 1),
}
