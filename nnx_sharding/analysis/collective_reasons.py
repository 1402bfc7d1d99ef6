"""Why a collective is in a compiled program.

A collective is where two shardings meet: the one with which a value is made, and the one with which
it is used. Both are found in the program, past instructions that only move the value. One search
goes from the operand of the collective back to the instruction that computes it; the other one goes
from the result of the collective on to the first instruction that computes with it.

    sine (model.up)  f32[4,16,8]  →  all-gather, all-gather  →  f32[16,16,16]  multiply (model)

The shapes in the program are those on one device. The trace has the shape of the whole value at the
same line, and the two shapes together tell the spec.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jax.sharding import PartitionSpec

from .collectives import Collective, Part, axes_text
from .hlo import Module
from .inferred_specs import spec_of_shard
from .instructions import Instruction, dims_at
from .names import module_of, operations
from .opcodes import COLLECTIVES, MOVING, PRODUCTS, base
from .parameters import axes_in, shape_text, spec_text
from .purposes import Purpose
from .reasons import Reason
from .source_frames import file_title, users_frame
from .traced_values import TRACED_PRODUCTS
from .units import bytes_text
from .values import Value, reached

Shape: TypeAlias = tuple[int, ...]

# The most values that a search follows. Instructions further away explain nothing to a reader.
_MOST_STEPS = 200

# What to write so that a collective is not needed, by its purpose.
_INSTEAD: dict[Purpose | None, str] = {
    "parameter": "nothing, if parameters are to be in parts over the axis of the batch, and "
    "gathered for use (FSDP); to send less for each row: more rows in a call, no remat (which "
    "gathers again in the backward pass), or tensor_parallel, which computes with parts; to send "
    "nothing: replicated, which holds all of them on each device",
    "state": "shard it as its module uses it, or write it inside of shard_map",
    "gradient": "nothing, if the batch is sharded over this axis",
    "sum": "nothing, if it is the one sum of a pair of layers (columns, then rows) in each pass; "
    "else shard the kernel over its columns instead of its rows, or leave this axis out: a product "
    "over a sharded dimension is a sum over devices",
    "result": "give out_shardings the spec with which it is computed",
}


class _Side(NamedTuple):
    """Where the value that a collective moves is computed, or used."""

    operation: str  # the name of the operation, such as dot_general, or the path of an argument
    module: str | None  # the path of the user's module, such as model.up; None outside of modules
    line: str | None  # the line of the user's code, such as model.py:12
    shape: Shape  # the shape of the value on one device

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.operation}{where}" + (f" ({self.line})" if self.line else "")


class CollectiveReasons:
    """Says for each collective of one program why it is there.

    Args:
      module: the compiled program.
      module_paths: the paths of the user's modules that it calls, such as ``model.up``.
      axis_sizes: the sizes of the mesh axes.
      auto_axes: the names of those that are Auto.
      whole_shapes: the shapes that the trace has, by line and operation, such as
        ``("model.py:12", "dot_general")``.
      why_argument: says why the argument with a path is sharded as it is.

    Attributes:
      _module: as given, like the other private attributes.
    """

    def __init__(
        self,
        module: Module,
        module_paths: Collection[str],
        axis_sizes: Mapping[str, int],
        auto_axes: Collection[str],
        whole_shapes: Mapping[tuple[str, str], set[Shape]],
        why_argument: Callable[[str], Reason],
    ):
        self._module, self._module_paths = module, module_paths
        self._axis_sizes, self._auto_axes = axis_sizes, auto_axes
        self._whole_shapes = whole_shapes
        self._why_argument = why_argument

    def reason(self, collective: Collective) -> Reason:
        """Says why one collective is there."""
        axes, sent = collective.over, bytes_text(collective.bytes_sent)
        use = f"{collective.name}, for {collective.purpose or 'an unknown purpose'}"
        if collective.times == 1:
            each = ""
        elif collective.times:
            each = f" in each of {collective.times} runs"
        else:  # It is in a loop of unknown length, or in a branch that counts as not taken.
            each = " in each run"
        subject = f"{collective.kind} over {axes}, sends {sent}{each} ({use})"
        # Of several arrays, the largest one of this purpose is explained.
        index = () if collective.main_part is None else (collective.main_part,)
        value = Value(collective.computation, collective.name, index)
        # Where the value is computed, and where it is used. ``made`` is None if that is unknown,
        # ``used`` if no instruction computes with the value, which the program then returns.
        made, used = self._made(collective, value), self._user(value)
        # The shapes that the whole value may have in the trace.
        whole_shapes = self._whole_shapes_of(made, used)
        spec = None if used is None else self._spec(used.shape, whole_shapes)
        facts = self._facts_of_maker(collective, made, whole_shapes)
        # A collective that sums several gradients has several users, so naming one says little.
        is_gradient = collective.purpose == "gradient"
        if used is not None and not (is_gradient and collective.parameters):
            facts.append(f"Used{self._sharded_text(used.shape, whole_shapes)} by {used}.")
        elif used is None and not is_gradient:
            facts.append(
                "The function returns it, with the sharding of out_shardings or of a Variable."
            )
        facts += _other_parts(collective)
        instead = _for_comparison(collective, made, used)
        if not instead and is_gradient and collective.in_loop and not _gathers_gradient(collective):
            instead = _for_gradient_in_loop(collective, self._auto_axes)
        instead = instead or _instead(collective, made, spec)
        return Reason(subject, tuple(facts), instead)

    def _facts_of_maker(
        self, collective: Collective, made: _Side | None, whole_shapes: Collection[Shape]
    ) -> list[str]:
        """Says where the value of a collective comes from; empty if that is unknown.

        A known purpose has a sentence of its own. "Made … by …" is for all others.

        Args:
          made: where the value is computed; None if that is unknown.
          whole_shapes: the shapes that the whole value may have.
        """
        axes = axes_text(collective.axes)
        if collective.purpose in ("parameter", "state") and collective.parameters:
            reasons = [self._why_argument(path) for path in collective.parameters[:2]]
            gathered = [f"It gathers {reason.subject}." for reason in reasons]
            # The first fact about an argument is the rule that shards it.
            return [*gathered, *reasons[0].facts[:1]]
        if _gathers_gradient(collective) and collective.parameters:
            fact = (
                f"It gathers the gradient of {_listed(collective.parameters)}: what it is computed "
                f"from is sharded over {axes}, but the gradient is used whole."
            )
            if made is None:
                return [fact]
            return [fact, f"Made{self._sharded_text(made.shape, whole_shapes)} by {made}."]
        if collective.purpose == "gradient" and collective.parameters:
            return [
                f"It adds up the parts of the gradient of {_listed(collective.parameters)}: each "
                f"device computes that of its part of the batch, which is sharded over {axes}."
            ]
        if made is None:
            return []
        if collective.purpose == "sum":
            fact = (
                f"Each device has a part of the sum that {made} computes, because a dimension over "
                f"which that sums is sharded over {axes}."
            )
            first = self._first_of_pair(collective)
            if first is None:
                return [fact]
            return [
                fact,
                f"The product takes what {first} makes in parts over {axes}, so this is the one "
                "sum after the two products.",
            ]
        return [f"Made{self._sharded_text(made.shape, whole_shapes)} by {made}."]

    def _whole_shapes_of(self, *sides: _Side | None) -> set[Shape]:
        """Returns the shapes that the whole value may have, by the lines where it is made and used.

        Sharding does not change the whole shape, so the shapes at both sides count. An unknown side
        is None, and so is an unknown line.
        """
        whole_shapes: set[Shape] = set()
        for side in sides:
            if side is not None:
                whole_shapes |= self._whole_shapes.get((side.line or "", side.operation), set())
        return whole_shapes

    def _spec(self, shape: Shape, whole_shapes: Collection[Shape]) -> PartitionSpec | None:
        """Returns the spec that cuts the whole value to a shape on one device, if only one does."""
        specs = set()
        for whole in whole_shapes:
            if len(whole) == len(shape):
                specs.add(spec_of_shard(whole, shape, self._axis_sizes, any_order=True))
        specs.discard(None)  # None says that no spec cuts this whole shape to ``shape``.
        return specs.pop() if len(specs) == 1 else None

    def _sharded_text(self, shape: Shape, whole_shapes: Collection[Shape]) -> str:
        """Writes a shape on one device, with its spec if that is known."""
        spec = self._spec(shape, whole_shapes)
        as_spec = "" if spec is None else f" as {spec_text(spec)}"
        return f"{as_spec}, {shape_text(shape)} on each device,"

    def _made(self, collective: Collective, value: Value) -> _Side | None:
        """Returns where the value of a collective is computed; None if that is unknown.

        A collective that sums is itself where its value is computed. If it has several parts, its
        name is that of all of them, and the part has the name of its own.
        """
        if collective.kind in ("all-reduce", "reduce-scatter") and collective.main_part is not None:
            part = collective.parts[collective.main_part]
            if part.operation is not None:
                operation = part.operation.rpartition("/")[2]
                path = module_of(part.operation, self._module_paths)
                return _Side(operation, path, part.source, part.shape)
        return self._maker(value)

    def _first_of_pair(self, collective: Collective) -> _Side | None:
        """Finds the product before a summed product, if that makes its result in parts for it.

        Tensor parallelism shards one kernel over its columns, and that of the next layer over its
        rows. The result of the first product is then sharded where the second one sums::

            %up = f32[8,32] dot(%x, %columns)      of (8,128), as P(None, 'model')
            %down = f32[8,64] dot(%up, %rows)      a part of the sum over 'model'

        Returns None if a collective or a slice lies between the two products, or if it is not known
        that the first result is sharded over the dimensions that the second product sums.
        """
        index = collective.main_part or 0
        maker = self._module.within[collective.computation].get(collective.name)
        if maker is None or index >= len(maker.operand_names) or not collective.axes:
            return None
        operand = Value(collective.computation, maker.operand_names[index])
        for product in self._products_before([operand]):
            summed_size = self._summed_size(product)
            for first in self._products_before(self._module.operands(product)):
                instruction = self._module.maker(first)
                if instruction is None:
                    continue
                side = self._side(instruction, _dims(instruction, first))
                spec = self._spec(side.shape, self._whole_shapes_of(side))
                if spec is None or not {*collective.axes} <= {*axes_in(spec)}:
                    continue
                sharded = {
                    i
                    for i, entry in enumerate(spec)
                    if not {*collective.axes}.isdisjoint(axes_in(PartitionSpec(entry)))
                }
                if summed_size in _sizes_with(side.shape, sharded):
                    return side
        return None

    def _summed_size(self, product: Value) -> int | None:
        """Returns how many elements of its first operand a product sums; None if unknown."""
        instruction = self._module.maker(product)
        if instruction is None or instruction.opcode != "dot":
            return None
        left = self._module.operands(product)[0]
        maker = self._module.maker(left)
        dims = () if maker is None else _dims(maker, left)
        numbers = re.findall(r"\d+", instruction.attributes.get("lhs_contracting_dims", ""))
        positions = [int(number) for number in numbers]
        if not positions or max(positions) >= len(dims):
            return None
        return math.prod(dims[i] for i in positions)

    def _products_before(self, starts: Sequence[Value]) -> Iterator[Value]:
        """Yields the products from which values are computed, without those before products.

        The search ends at collectives and slices, which may cut a whole array to parts.
        """
        ends = PRODUCTS | COLLECTIVES | {"dynamic-slice"}

        def computed_from(value: Value) -> Sequence[Value]:
            """Lists the values that a value is computed from; empty where the search ends."""
            instruction = self._module.maker(value)
            if instruction is None or base(instruction.opcode) in ends:
                return ()
            return self._module.sources(value)

        for start in starts:
            for value in itertools.islice(reached(start, computed_from), _MOST_STEPS):
                instruction = self._module.maker(value)
                if instruction is not None and instruction.opcode in PRODUCTS:
                    yield value

    def _maker(self, value: Value) -> _Side | None:
        """Follows a value back to the instruction that computes it, or to an argument.

        The search is like `moves.computing_value` with ``past_user_moves``, but it also finds the
        shape, and goes from what a loop carries to the initial value. Returns None if the way is
        longer than ``_MOST_STEPS``, or if damaged text lacks an instruction.
        """
        shape: Shape | None = None
        for _ in range(_MOST_STEPS):
            instruction = self._module.maker(value)
            if instruction is None:
                return None
            # The shape where the value is computed is wanted, for example in front of a transpose.
            # A shape with another number of dimensions does not count, because XLA computes
            # products of (batch, length, features) in two dimensions, and the user knows only the
            # shape behind the reshape.
            dims = _dims(instruction, value)
            if shape is None or len(shape) == len(dims):
                shape = dims
            sources = self._module.passed(value)
            if not sources and (_moves(instruction) or instruction.opcode == "tuple"):
                sources = self._module.operands(value)
            if not sources:  # The value is computed here, or is an argument.
                return self._side(instruction, shape)
            value = sources[0]  # For what a loop carries, this is the initial value.
        return None

    def _user(self, value: Value) -> _Side | None:
        """Follows a value to the first instruction that computes with it, also into fusions.

        A value that a loop carries is followed into the body. Returns None if no instruction
        computes with the value: the program returns it, or the search ends at another tuple.
        """
        pending, seen = [value], {value}
        bodies: set[str] = set()  # computations that a loop runs, with the fusions in them
        while pending and len(seen) < _MOST_STEPS:
            value = pending.pop()
            is_in_loop = value.computation in bodies
            # The values to follow, which are this one, moved or passed on. If ``value`` is what a
            # fusion returns, the fusion's result is among them.
            following = self._results_of_callers(value)
            users = self._module.users.get(value.computation, {})
            for instruction, operand_number in users.get(value.name, ()):
                if instruction.opcode in ("fusion", "call"):
                    # The search goes on from the parameter of the called computation.
                    [callee, *_] = instruction.callees
                    if is_in_loop:
                        bodies.add(callee)
                    following += [
                        Value(callee, inside.name)
                        for inside in self._module.within[callee].values()
                        if inside.number == operand_number  # Only parameters have a number.
                    ]
                elif is_in_loop and instruction.opcode == "dynamic-slice":
                    # In a loop, a slice is what one run takes. Outside of loops, slices cut out the
                    # parts of devices.
                    maker = self._module.maker(value)
                    if maker is not None:
                        side = self._side(instruction, _dims(maker, value))
                        return side._replace(operation="a loop, slice by slice,")
                elif instruction.opcode == "get-tuple-element":
                    # Of a value with an index, the other items of the tuple are other values.
                    if not value.index or instruction.tuple_index == value.index[0]:
                        following.append(Value(value.computation, instruction.name))
                elif _moves(instruction):
                    # The end of an asynchronous collective makes the same tuple as the start.
                    index = value.index if instruction.opcode.endswith("-done") else ()
                    following.append(Value(value.computation, instruction.name, index))
                elif instruction.opcode == "tuple":
                    items = [*self._in_loops(value.computation, instruction, operand_number)]
                    bodies.update(item.computation for item in items)
                    following += items
                elif instruction.opcode != "while":
                    maker = self._module.maker(value)
                    if maker is not None:
                        return self._side(instruction, _dims(maker, value))
            pending += [new for new in following if new not in seen]
            seen.update(following)
        return None

    def _in_loops(self, home: str, carry: Instruction, index: int) -> Iterator[Value]:
        """Yields the values that the bodies of loops read as one item of a carried tuple."""
        for loop, _ in self._module.users.get(home, {}).get(carry.name, ()):
            body = dict(loop.calls).get("body", "") if loop.opcode == "while" else ""
            instructions = self._module.within.get(body, {})
            for item in instructions.values():
                if item.opcode != "get-tuple-element" or item.tuple_index != index:
                    continue
                # The only parameter of a body is the tuple. Other tuples in it are not followed.
                source = instructions.get(item.operand_names[0])
                if source is not None and source.opcode == "parameter":
                    yield Value(body, item.name)

    def _results_of_callers(self, value: Value) -> list[Value]:
        """Returns the results of fusions and calls of the computation whose root a value is.

        The list is empty for any other value. Results of loops and conditionals are not followed.
        """
        root = self._module.roots.get(value.computation)
        if root is None or root.name != value.name:
            return []
        return [
            Value(computation.name, caller.name)
            for computation, caller in self._module.callers.get(value.computation, ())
            if caller.opcode in ("fusion", "call")
        ]

    def _side(self, instruction: Instruction, shape: Shape) -> _Side:
        """Describes an instruction by the user's names: operation, module and line of code.

        ``shape`` is the shape of the moved value at this instruction, on one device.
        """
        name = next(iter(operations(instruction.operation or "")), "")
        frame = users_frame(self._module.source(instruction))
        line = None if frame is None else f"{file_title(frame[0])}:{frame[1]}"
        operation = name.rpartition("/")[2] or instruction.opcode
        return _Side(operation, module_of(name, self._module_paths), line, shape)


def _listed(paths: tuple[str, ...]) -> str:
    """Writes the first two paths, and how many more there are."""
    more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
    return f"{', '.join(paths[:2])}{more}"


def _sizes_with(shape: Shape, sharded: Collection[int]) -> set[int]:
    """Returns the sizes that the sharded dimensions of a shape have together with others.

    The first dimension is the batch, over which only gradients are sums, so it is left out. A
    result of attention of the shape (batch, heads, length, features) with sharded heads, for
    example, is later summed over heads and features.
    """
    if 0 in sharded:
        return set()
    others = [size for i, size in enumerate(shape) if i and i not in sharded]
    size = math.prod(shape[i] for i in sharded)
    return {
        size * math.prod(chosen)
        for count in range(len(others) + 1)
        for chosen in itertools.combinations(others, count)
    }


def _other_parts(collective: Collective) -> list[str]:
    """Says what else a collective carries, besides what it is for: one fact for each purpose."""
    others: dict[Purpose, list[Part]] = {}
    for part in collective.parts:
        if part.purpose != collective.purpose:
            others.setdefault(part.purpose, []).append(part)
    facts = []
    for purpose, parts in others.items():
        names = [
            ", ".join(part.parameters) or (part.operation or "").rpartition("/")[2]
            for part in sorted(parts, key=lambda part: -part.bytes)
        ]
        known = tuple(dict.fromkeys(filter(None, names)))
        of = f" of {_listed(known)}" if known else ""
        size = bytes_text(sum(part.bytes for part in parts))
        facts.append(f"The compiler merged others into it: {purpose}{of} ({size}).")
    return facts


def _moves(instruction: Instruction) -> bool:
    """Tells whether an instruction only moves the elements of its first operand.

    Collectives that do not sum count as moves, because a reader asks what is computed before and
    after them. In `moves.py`, only an all-gather does: what other collectives make is a new array.
    """
    if instruction.opcode in MOVING or instruction.opcode.endswith(("-start", "-done")):
        return True
    return instruction.collective not in (None, "all-reduce", "reduce-scatter")


def _dims(instruction: Instruction, value: Value) -> Shape:
    """Returns the dimensions of a value that an instruction makes.

    If the value is a tuple, these are the dimensions of its first part.
    """
    return dims_at(instruction, value.index) or dims_at(instruction, (0,))


def _gathers_gradient(collective: Collective) -> bool:
    """Whether a collective joins the parts of a gradient, instead of adding up partial sums."""
    return collective.purpose == "gradient" and collective.kind == "all-gather"


# Operations that compare the elements along a dimension; XLA names some of them "reduce".
_COMPARISONS = frozenset({"argmax", "argmin", "reduce", "reduce_max", "reduce_min"})


def _for_comparison(collective: Collective, made: _Side | None, used: _Side | None) -> str:
    """Says how to send less for a comparison along a sharded dimension; empty for other uses.

    A comparison needs the whole dimension, so a constraint only moves the gather. But each device
    can find the largest element of its part, and the largest of these is the largest of all.
    """
    is_gather = collective.kind == "all-gather" and collective.purpose in ("reshard", "result")
    if not is_gather or used is None or used.operation not in _COMPARISONS:
        return ""
    if made is not None and made.operation in _COMPARISONS:
        return "nothing: each device has compared the elements of its part, and sends the result"
    axes = axes_text(collective.axes)
    return (
        "no constraint, which would send the same; on Auto axes, as in a method of the model, the "
        "compiler compares the parts, and sends their results; or, in shard_map, take the largest "
        f"of each part and its index, all_gather both over {axes}, and choose among these"
    )


def _for_gradient_in_loop(collective: Collective, auto_axes: Collection[str]) -> str:
    """Says how to reduce gradients after a loop instead of in each run.

    A loop around the backward pass runs over microbatches, whose number is kept. A loop within the
    backward pass runs over time or layers. The name of the operation tells these apart, because JAX
    writes the backward pass as ``transpose``:

        jit(step)/while/body/transpose(jvp(model))/up/dot_general     over microbatches
        jit(step)/transpose(jvp(model))/while/body/up/dot_general     over time or layers

    ``auto_axes`` are the mesh axes that are Auto, for which `accumulate_gradients` needs ``axis``.
    It finds Explicit axes in the types of arrays.
    """
    axes = collective.axes or ("...",)
    axis_option = f"axis={(axes[0] if len(axes) == 1 else axes)!r}"
    needs_axis = collective.axes is None or not {*axes}.isdisjoint(auto_axes)
    before_backward = next(iter(operations(collective.operation or "")), "").partition("transpose(")
    if "while/" in before_backward[0]:
        option = f" with {axis_option}" if needs_axis else ""
        return (
            f"accumulate_gradients{option}, with as many steps as the loop has microbatches: it "
            "reduces once, after the loop, the gradients of parameters that are replicated over "
            f"{axes_text(collective.axes)}; nothing, if it is in use, and the parameters are "
            "sharded over that axis, which needs a reduction in each run"
        )
    option = f", {axis_option}" if needs_axis else ""
    # In a loop over layers, each run reduces the gradients of another layer's parameters, so
    # reducing once after the loop would not send less.
    return (
        f"accumulate_gradients(loss, steps=1{option}) for value_and_grad(loss), which reduces "
        "once, after the loop, if that is over time, as in nnx.RNN; nothing, if it is over layers"
    )


def _instead(collective: Collective, made: _Side | None, spec: PartitionSpec | None) -> str:
    r"""Says what to write to avoid a collective.

    The text for a ``reshard`` is, for example, ``with_sharding_constraint to P('data') where it is
    made, or jit(activation_shardings={r"blocks/\d+/up": P('data')}) if model.blocks[0].up returns
    it``.

    Args:
      made: where the value that it moves is made; None if that is unknown.
      spec: the spec with which the value is used; None if that is unknown.
    """
    module = "" if made is None else made.module or ""
    is_product = made is None or made.operation in TRACED_PRODUCTS
    # A sum that no product computes, such as a mean in a norm, has no kernel to shard.
    if collective.purpose == "sum" and not is_product:
        array = f"what {module} takes" if module else "the array"
        return (
            "nothing, for a loss over the batch; else keep the dimension that is summed whole, by "
            f"a spec of {array} without this axis"
        )
    if _gathers_gradient(collective):
        return (
            "nothing, for the few bytes of a bias or scale; else shard the parameter over "
            f"{axes_text(collective.axes)}, too, or keep what its module takes whole over it, by "
            "activation_shardings of jit"
        )
    if collective.purpose in _INSTEAD:  # It has all purposes except reshard and None.
        return _INSTEAD[collective.purpose]
    # "model.blocks[0].up" → "blocks[0].up"; empty for a function, or the model itself.
    _, _, path_in_model = module.partition(".")
    # If the value is used unsharded, the collective makes all of it on each device. A constraint to
    # that spec would send as much, so the advice is to shard the value.
    if spec is None or not axes_in(spec):
        is_gather = collective.kind == "all-gather" and collective.axes
        how = f"but not over {axes_text(collective.axes)}" if is_gather else "as it is used"
        others = f", or by activation_shardings of jit if {module} returns it"
        return (
            f"shard it, {how}: by with_sharding_constraint where it is made"
            f"{others if path_in_model else ''}"
        )
    # The entries behind the last sharded dimension are left out, because a spec need not have them.
    entries = [*spec]
    while entries[-1] is None:  # ``axes_in(spec)`` is not empty, so one entry is not None.
        entries.pop()
    written = spec_text(PartitionSpec(*entries))
    constraint = f"with_sharding_constraint to {written} where it is made"
    if not path_in_model:
        return constraint
    # A regular expression for all blocks: "blocks[0].up" → r"blocks/\d+/up".
    pattern = re.sub(r"\[\d+\]", r"/\\d+", path_in_model).replace(".", "/")
    code = f'jit(activation_shardings={{r"{pattern}": {written}}})'
    return f"{constraint}, or {code} if {module} returns it"
