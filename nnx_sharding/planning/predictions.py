"""What candidates need, before anything is compiled: from shapes, and from one trace of the step.

**Memory**: the bytes of the arguments, exact except for the padding of tiles. **Compute**: the
matrix products and convolutions in the jaxpr of the step. **Bytes sent**: what one device sends in
a training step, roughly. Let b be the bytes of a parameter, divided by the sizes of the axes that
shard it during the whole step (`model`, `stage`, `expert`). Let s be the number of its shards over
axes of the batch, and n the number of devices along these axes:

    sharded over the batch    3 b (1 - 1/s)            gathered twice, its gradient scattered
    its replicas              2 b/s (1 - s/n)          all-reduce of the gradient's shards
    tensor parallelism        tokens × features × …    activations on both sides of a kernel
    experts                   tokens × features × …    tokens go to two experts and back
    pipeline                  tokens × features × …    between stages, in each tick, both ways; and
                              what is above for the layers of a stage is sent in each tick, too,
                              but with 1F1B what is not sharded over the batch: it is reduced once;
                              blocks of a list move to their stages, and their gradients back
    context                   tokens × features × …    keys and values, or heads for positions,
                              both ways: `CONTEXT_ROUNDS`

Sums over a parameter's axes are first within slices, then between them. What stages send goes over
the slower network if their axis is one along which there are different slices. The number of
features that go between stages, and for attention, is taken to be the number of elements of the
smallest parameter of a layer, such as the scale of a norm.

From other modules: `Arguments` are those of the step (``tokens`` of the batch, ``layers`` of
stacks, ``experts``), `Axes` the names of mesh axes by their roles, a `ShardingRow` says how one
array of a module is sharded, a `Schedule` how a pipeline runs.
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
from ..experimental.context import OverSequence
from ..partition.mesh import make_mesh
from ..partition.pipeline_schedule import Schedule
from ..partition.variables import listing_of
from ..report.sharding import ShardingRow, sharding_rows
from ..specs.fitting import axes_of, pad_entries, spec_and_mesh
from ..specs.state_sharding import StateSharding
from ..transforms.jit import jit
from .candidates import SHARDING, Arguments, Axes, Candidate, split_name


class Products(NamedTuple):
    """The matrix products and convolutions of a step, on all devices together."""

    flops: float = 0.0  # a conditional counts its largest branch
    accessed: float = 0.0  # the bytes of their operands and results, likewise
    least: float = 0.0  # the flops; a conditional counts its smallest branch
    is_narrow: bool = False  # whether any is of 8-bit numbers, which may have a higher peak rate

    def times(self, count: float) -> Products:
        """Returns the products of so many runs."""
        return Products(
            self.flops * count, self.accessed * count, self.least * count, self.is_narrow
        )

    def least_seconds(self, devices: int, hardware: Hardware) -> float:
        """Returns a lower bound of a step's time: its products at the peak rate of all devices."""
        rates: list[float | None] = [hardware.flops]
        if self.is_narrow:  # for a bound, all products count as narrow if some are
            rates += [hardware.int8_flops, hardware.fp8_flops]
        return self.least / devices / max(filter(None, rates))


def products_of(
    fun: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any], axes: Axes
) -> Products | None:
    """Traces a step for one device and counts the products whose results are used.

    Args:
      fun: the step.
      args: its arguments.
      options: those of jit.
      axes: the names of mesh axes by their roles, all of which the step may name.

    Returns:
      The products; None if the step cannot be traced for one device.
    """
    sizes = {name: 1 for names in axes for name in names}  # one device along each axis
    for kind in (AxisType.Auto, AxisType.Explicit):  # the step may only be written for one
        mesh = make_mesh(sizes, kind, devices=jax.devices()[:1])
        try:
            with jax.set_mesh(mesh):
                traced = jit(fun, mesh=mesh, **options).trace(*args)
                # The compiler drops equations whose results are not used, too.
                return products_in(_compat.used_equations(traced._stage.jaxpr))
        except Exception:  # it may need several devices; each candidate says what fails for it
            continue
    return None


def products_in(equations: Iterable[JaxprEqn]) -> Products:
    """Sums the products of equations and of the jaxprs in them.

    The body of a ``scan`` counts for each iteration, that of a ``while`` loop once, because the
    number of its iterations is unknown. All other operations are left out, as products dominate
    the time of a model.
    """
    parts = list[Products]()
    for equation in equations:
        name, params = equation.primitive.name, equation.params
        operands: list[Any] = [x.aval for x in equation.invars]
        results: list[Any] = [x.aval for x in equation.outvars]
        if flops := _product_flops(name, params, [*operands, *results]):
            parts.append(
                Products(
                    flops=flops,
                    accessed=sum(_size(array) for array in (*operands, *results)),
                    least=flops,
                    # Both factors; more operands are sizes of groups.
                    is_narrow=all(array.dtype.itemsize == 1 for array in operands[:2]),
                )
            )
            continue
        called = [products_in(jaxpr.eqns) for jaxpr in _compat.jaxprs_of(equation)]
        if called and name == "cond":  # one of the branches runs
            largest = max(called, key=lambda branch: branch.flops)
            called = [largest._replace(least=min(branch.least for branch in called))]
        if name == "while":  # its body need not run
            called = [part._replace(least=0.0) for part in called]
        num_runs = params.get("length", 1)  # only a scan has this parameter
        parts += [part.times(num_runs) for part in called]
    return Products(
        flops=sum(part.flops for part in parts),
        accessed=sum(part.accessed for part in parts),
        least=sum(part.least for part in parts),
        is_narrow=any(part.is_narrow for part in parts),
    )


def _size(aval: Any) -> int:
    """Returns the bytes of a value; 0 for one that is no array, such as a token."""
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0


def _product_flops(name: str, params: Mapping[str, Any], arrays: Sequence[Any]) -> float:
    """Counts the flops of a primitive that is a product; 0 for others.

    Args:
      name: the name of the primitive.
      params: its parameters.
      arrays: the avals of its operands and then of its result.
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
        # If groups divide rows, each row of the result is one product with a matrix of its group,
        # as in `dot_general`. If they divide the dimension that is summed over, the result has one
        # matrix for each group, and each sums only over its own part.
        if {*numbers.lhs_ragged_dimensions} <= {*contracting}:
            contracted /= group_sizes.shape[-1]
        return float(2 * math.prod(result.shape) * contracted)
    return 0.0


def _convolution_flops(
    params: Mapping[str, Any], lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]
) -> float:
    """Counts the flops of a convolution, by its parameters and the shapes of its arrays.

    Products with padding, and with the zeros of a dilated input, do not count.
    """
    # The specs list dimensions: of the input (batch, features, *spatial), of the kernel
    # (outputs, inputs, *spatial), of the result (batch, features, *spatial).
    numbers = params["dimension_numbers"]
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    # The kernel's inputs are those of one group, unlike the input's features.
    products = batch * features * rhs[numbers.rhs_spec[1]]
    for i, stride in enumerate(params["window_strides"]):
        # For each output along this axis, how many elements of the input are in its window.
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
    sent_within: float  # bytes that it sends in a step, within slices
    sent_between: float  # and between them
    slowdown: float  # by stages of a pipeline that wait: 1.5 if a step takes 1.5 times as long
    key: Any  # equal for candidates that shard everything alike

    def seconds(
        self, products: Products | None, devices: int, hardware: Hardware
    ) -> dict[str, float]:
        """Predicts the seconds that a step takes for each resource alone.

        The largest is the time of a step if all communication is hidden, the sum if none is.

        Args:
          products: those of the step, on all devices together; None if they are unknown.
          devices: the number of devices.
          hardware: the rates.
        """
        products = products or Products()
        within = self.sent_within / hardware.interconnect_bandwidth
        # Arguments are read and written once.
        accessed = 2 * self.arguments + products.accessed / devices
        return {
            "compute": products.flops / devices * self.slowdown / hardware.flops,
            "memory": accessed / hardware.memory_bandwidth,
            # Two networks, which can be used at the same time.
            "interconnect": max(within, self.seconds_between_slices(hardware)),
        }

    def seconds_between_slices(self, hardware: Hardware) -> float:
        """Predicts how long slices send to each other."""
        bandwidth = hardware.network_bandwidth or hardware.interconnect_bandwidth
        return self.sent_between / bandwidth


def predict(
    candidate: Candidate, arguments: Arguments, axes: Axes, num_slices: int = 1
) -> Prediction:
    """Predicts what a candidate needs on one device.

    Args:
      candidate: the candidate, with its shardings.
      arguments: those of the step.
      axes: the names of mesh axes by their roles.
      num_slices: the number of slices of TPUs that the devices are on.

    Raises:
      ValueError: a spec does not fit.
    """
    sums = _Sums(candidate, arguments, axes, num_slices)

    def is_single(sharding: Any) -> bool:
        """Whether it is the sharding of a whole argument, although it is a pytree to JAX."""
        return sharding is None or isinstance(sharding, StateSharding)

    # Each sharding is added with its argument, or with the part of an argument that it is for.
    jax.tree.map(sums.add, candidate.in_shardings, arguments.args, is_leaf=is_single)
    schedule = sums.schedule
    return Prediction(
        arguments=sums.bytes,
        sent_within=sums.sent_within,
        sent_between=sums.sent_between,
        slowdown=1.0 if schedule is None else schedule.ticks / schedule.microbatches,
        key=tuple(sums.key),
    )


class _Sums:
    """The sums over all arguments; the formulas are at the top of this file.

    A *row* (`ShardingRow`) is one array of a module: its ``path``, ``shape``, ``spec``, and its
    ``bytes_total``, and ``bytes_per_device``.

    Attributes:
      arguments: those of the step, with what is known of their batch and models.
      axes: the names of mesh axes by their roles.
      styles: those of the candidate's strategy for layers, such as ``tensor``.
      mesh: a mesh of the candidate's sizes, without devices.
      bytes: of the arguments on one device, so far.
      sent_within: the bytes that one device sends within slices, so far.
      sent_between: those that it sends between slices.
      key: the sizes of the mesh, and then which axes shard each array that was added, with its
        memory. Candidates with equal keys compile to equal programs, so one of them is enough.
      sizes: of the mesh axes with more than one device.
      crossing: the mesh axes along which there are different slices.
      tokens: of the batch, on one device.
      schedule: that of the pipeline of a model that was added, if it has one.
    """

    def __init__(self, candidate: Candidate, arguments: Arguments, axes: Axes, num_slices: int):
        self.arguments, self.axes = arguments, axes
        _, self.styles = split_name(candidate.strategy)
        names, sizes = zip(*candidate.sizes.items(), strict=True)
        # Without devices, which shapes do not need.
        self.mesh = AbstractMesh(sizes, names, (AxisType.Auto,) * len(names))
        self.sizes = {axis: size for axis, size in candidate.sizes.items() if size > 1}
        self.crossing = axes.between_slices(candidate.mesh, num_slices)
        self.bytes, self.sent_within, self.sent_between = 0, 0.0, 0.0
        self.schedule: Schedule | None = None
        self.key: list[Any] = [tuple(self.sizes.items())]
        # All of these axes divide the batch, by rows or by positions.
        self.tokens = arguments.tokens / self._num_devices("replica", *SHARDING)

    def _num_devices(self, *roles: str) -> int:
        """Counts the devices along the axes of these roles."""
        return self._product(self.axes.in_mesh(self.sizes, *roles))

    def _product(self, axes: Iterable[str]) -> int:
        """Multiplies the sizes of axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def add(self, sharding: StateSharding | Sharding | PartitionSpec | None, part: Any) -> None:
        """Adds an argument, or a part of one that has its own sharding.

        Args:
          sharding: of a module or an optimizer, or of arrays outside of them; None to replicate.
          part: the argument.
        """
        if not isinstance(sharding, StateSharding):
            self._add_arrays(sharding, part)
            return
        rows = sharding_rows(listing_of(part).flat, sharding, self.mesh)
        if faults := [f"{row.path}: {row.why}" for row in rows if row.is_fault]:
            raise ValueError("these specs do not fit: " + "; ".join(faults))
        self.bytes += sum(row.bytes_per_device for row in rows if not _is_on_host(row))
        self.key += [tuple((*self._axes_of_row(row), row.memory_kind) for row in rows)]
        self.key.append(sharding.activations)  # candidates may differ in these only
        if isinstance(part, nnx.Optimizer):  # its state is updated where it is: nothing is sent
            return
        self._add_layers(sharding, rows)  # first, as it sets the schedule that parameters need
        for row in rows:
            self._add_parameter(row)

    def _add_arrays(self, sharding: Sharding | PartitionSpec | None, part: Any) -> None:
        """Adds the arrays of a pytree outside of modules, such as the batch, which are not sent."""
        spec, mesh = spec_and_mesh(sharding, self.mesh) or (PartitionSpec(), self.mesh)
        for array in jax.tree.leaves(part):
            if hasattr(array, "shape"):
                shape = NamedSharding(mesh, spec).shard_shape(array.shape)
                self.key.append((*self._axes_by_dimension(spec, shape), _is_on_host(sharding)))
                if not _is_on_host(sharding):
                    self.bytes += math.prod(shape) * array.dtype.itemsize

    def _add_layers(self, sharding: StateSharding, rows: Sequence[ShardingRow]) -> None:
        """Adds what goes from layer to layer in a pipeline, and for attention over a sequence.

        Args:
          sharding: that of a model, which declares how its modules run: the ``schedule`` of a
            declaration is a pipeline's, or how attention exchanges positions, or None.
          rows: those of its parameters.
        """
        declared = sharding.activations.shardings if sharding.activations else ()
        schedules = [x.schedule for x in declared]
        pipeline = next((x for x in schedules if isinstance(x, Schedule)), None)
        # The bytes of each parameter in one layer, and of all that moves to other stages.
        in_stacks = [row for row in rows if row.shape[:1] and row.shape[0] in self.arguments.layers]
        bytes_in_layer = [row.bytes_total / row.shape[0] for row in in_stacks]
        block_bytes = 0.0
        if pipeline is not None and not in_stacks:
            # The layers are blocks of a list, each with parameters of its own, which are those that
            # the pipeline shards over stages. Before a step, blocks move to the stages that run
            # them; layers of a stack are there already.
            stages = {*self.axes.in_mesh(self.sizes, "stage")}
            for row in rows:
                if not stages.isdisjoint(itertools.chain(*self._axes_of_row(row))):
                    bytes_in_layer.append(row.bytes_total)
            block_bytes = sum(bytes_in_layer)
        # The bytes of a token between two layers: as many as the smallest parameter of a layer,
        # such as the scale of a norm, has.
        per_token = min(bytes_in_layer, default=0.0)
        if pipeline is not None:
            self.schedule = pipeline
            self._add_stages(pipeline, per_token, block_bytes)
        # Without a declared method, positions that are sharded are taken to go around a ring.
        method = next((x.method for x in schedules if isinstance(x, OverSequence)), "ring")
        self._add_contexts(method, per_token)

    def _add_stages(self, schedule: Schedule, per_token: float, block_bytes: float) -> None:
        """Adds what the devices of a pipeline send each other; each of them is one stage.

        Args:
          schedule: that of the pipeline.
          per_token: the bytes of a token between two layers.
          block_bytes: those of the parameters of all blocks of a list, whose arrays are divided
            over the stages, and gathered where they run; 0 for a stack.
        """
        # A stage runs its share of the blocks. Of their arrays, it has its share again, and gets
        # the rest from the other stages.
        blocks_of_stage = block_bytes / schedule.stages
        gathered = blocks_of_stage * (1 - 1 / schedule.stages)
        # In each tick, also while a stage waits, a microbatch goes to the next stage. At the end,
        # the last stage sends the results of the whole batch to all.
        batch_bytes = self.tokens * per_token
        microbatch_bytes = batch_bytes / schedule.microbatches
        activations = schedule.ticks * microbatch_bytes + batch_bytes
        # The backward pass sends the gradients of all this in the other direction.
        sent = 2 * (gathered + activations)
        if {*self.axes.in_mesh(self.sizes, "stage")} & self.crossing:
            self.sent_between += sent
        else:
            self.sent_within += sent

    def _add_contexts(self, method: str, per_token: float) -> None:
        """Adds what attention over a sharded sequence sends.

        Args:
          method: how it exchanges keys and values, a key of `CONTEXT_ROUNDS`.
          per_token: the bytes of a token between two layers.
        """
        devices = self._num_devices("context")
        if devices == 1:
            return
        layers = max(self.arguments.layers, default=0)  # of the longest stack
        rounds = CONTEXT_ROUNDS[method](devices)
        # All-to-all may be within one axis, with a ring over another: no rounds for one device.
        rounds += CONTEXT_ROUNDS["ring"](self._num_devices("ring"))
        # In a round, keys and values of all tokens are sent: two arrays.
        keys_and_values = 2 * self.tokens * per_token
        self.sent_within += keys_and_values * rounds * layers

    def _axes_of_row(self, row: ShardingRow) -> tuple[tuple[str, ...], ...]:
        """Lists the axes that shard each dimension, without those of size 1."""
        spec = row.spec if isinstance(row.spec, PartitionSpec) else PartitionSpec()
        return self._axes_by_dimension(spec, row.shape)

    def _axes_by_dimension(
        self, spec: PartitionSpec, shape: Sequence[int]
    ) -> tuple[tuple[str, ...], ...]:
        """Lists the axes of a spec for each dimension of a shape, without those of size 1."""
        entries = pad_entries(spec, len(shape))
        return tuple(tuple(axis for axis in axes_of(x) if axis in self.sizes) for x in entries)

    def _add_parameter(self, row: ShardingRow) -> None:
        """Adds what is sent for one parameter, and for the activations around a kernel.

        Names are those of the formulas at the top of this file: ``held`` is b, ``shards`` is s and
        ``devices`` is n.
        """
        if "float" not in row.dtype or not row.shape:  # it has no gradient, or hardly one
            return
        axes_of_dims = self._axes_of_row(row)
        over = {axis for axes in axes_of_dims for axis in axes}  # all axes that shard it
        # The axes that shard it during the whole step. An axis for experts is one of these only for
        # the dimension of experts: it shards other parameters as an axis for data.
        expert: set[str] = set()
        if "expert" in self.styles:
            for axes, size in zip(axes_of_dims, row.shape, strict=True):
                if size == self.arguments.experts:
                    expert |= {*axes} & {*self.axes.expert}
        stage, model = {*self.axes.stage} & over, {*self.axes.model} & over
        held: float = row.bytes_total / self._product(expert | stage | model)
        # The axes along which devices use the same parameter for different tokens: these gather it
        # and reduce its gradient, first within slices, then what that leaves between them.
        data = {*self.axes.in_mesh(self.sizes, "replica", *SHARDING)} - expert
        sent = []
        for level in (data - self.crossing, data & self.crossing):
            shards, devices = self._product(level & over), self._product(level)
            gathers_and_scatter = 3 * held * (1 - 1 / shards)
            all_reduce = 2 * held / shards * (1 - shards / devices)
            sent.append(gathers_and_scatter + all_reduce)
            held /= shards
        within, between = sent
        times = 1
        if self.schedule is not None and stage:
            # The layers of a stage are used in each tick. But 1F1B, which interleaves forward and
            # backward, adds up the gradients of what is not sharded over data, to reduce them once.
            is_reduced_once = self.schedule.interleaves and data.isdisjoint(over)
            times = 1 if is_reduced_once else self.schedule.ticks
        self.sent_within += times * within
        self.sent_between += times * between
        if len(row.shape) > 1 and (expert or model):
            self._add_activations(
                row,
                axes_of_dims,
                expert=expert,
                model=model,
                num_stages=self._product(stage),
            )

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
          axes_of_dims: the axes that shard each of its dimensions.
          expert: the axes for experts that shard it. If there are some, tokens go to the experts.
          model: the axes for tensor parallelism that do.
          num_stages: the number of stages that the stack is divided over.
        """
        kernel, axes_of_kernel, layers = row.shape, axes_of_dims, 1.0
        if row.shape[0] in self.arguments.layers:  # a stack, of which each stage runs its part
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


# Of a usual mixture of experts: each token goes to two experts, which are gated MLPs. Their kernels
# are "gate", "up" and "down".
_EXPERTS_PER_TOKEN = 2
_KERNELS_PER_EXPERT = 3


def _elements_to_experts(kernel: Sequence[int]) -> float:
    """Counts the elements that a token sends in a step, for one kernel of its experts.

    A token goes to its experts and comes back, forward and backward. All kernels of an expert use
    the same token, so each counts a third of that.

    Args:
      kernel: the shape (experts, in, out). The smaller one of in and out is the width of a token;
        the larger one is the hidden width of an expert, which is not sent.
    """
    width = min(kernel[-2:])
    there_and_back, forward_and_backward = 2, 2
    times_sent = _EXPERTS_PER_TOKEN * there_and_back * forward_and_backward
    return times_sent / _KERNELS_PER_EXPERT * width


def _elements_in_all_reduce(
    kernel: Sequence[int], axes_of_kernel: Sequence[tuple[str, ...]], model: set[str]
) -> float:
    """Counts the elements that a token sends in a step, for a kernel with tensor parallelism.

    If the kernel (in, out) is sharded along ``in``, its outputs are partial sums, all-reduced in
    the forward pass. If it is along ``out``, the gradients of its inputs are, in the backward pass.
    So the dimension that is not sharded has the features that are sent.

    Args:
      kernel: its shape. There may be several dimensions of inputs or outputs, such as (width,
        heads, head_dim) with sharded heads: the largest one that is not sharded counts.
      axes_of_kernel: the axes that shard each dimension.
      model: the axes for tensor parallelism.
    """
    unsharded = [
        size for size, axes in zip(kernel, axes_of_kernel, strict=True) if model.isdisjoint(axes)
    ]
    return 2 * max(unsharded, default=1)  # an all-reduce sends what it sums twice


def _is_on_host(sharding: Any) -> bool:
    """Tells whether a sharding, or a row, is for the memory of the host."""
    return "host" in (getattr(sharding, "memory_kind", None) or "")


# How often keys and values, or as many bytes, are sent in a step by so many devices.
CONTEXT_ROUNDS: dict[str, Callable[[int], float]] = {
    # Forward, and backward again, with their gradients.
    "ring": lambda devices: 3 * (devices - 1),
    # Queries, keys, values and outputs, which are twice as much, and the gradients of all.
    "all_to_all": lambda devices: 2 * 2 * (1 - 1 / devices),
    # Keys and values forward, and their gradients backward.
    "all_gather": lambda devices: 2 * (devices - 1),
}
