"""Exports a function of ``jit`` or ``shard_map``.

A program takes and returns a list of arrays. What they mean is known from tracing: the *plan* of a
call has the *structure* of its arguments (``core/structure.py``), and the *outcome* that of what
the function returned and changed. A structure describes modules without their arrays; the *slot* of
an array is its index in the list. JAX lowers the program, and the *manifest* writes both down as
data: which array of the arguments is which input, and which output is which part of the result or a
new value of which argument. What such data cannot say, a changed static attribute for example, is
an error here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import jax

from .. import _compat
from .._version import __version__
from ..analysis.meshes import MeshDescription
from ..core.declared import abstract, is_committed
from ..core.failures import call_with_explained_errors
from ..core.outcome import INPUT, Outcome
from ..core.plan import Plan
from ..core.structure import LEAF, Child, Container, RefEntry, Structure, VariableEntry, parts_of
from ..diagnostics.differences import differences, show_child
from ..errors import message, raise_listed
from ..specs.fitting import show
from ..specs.paths import Path
from ..transforms.lifted import Lifted
from .exported import Exported
from .manifest import Argument, ArrayInfo, Manifest, Tree, leaves_of, meshes_of, tree_from, tree_of


def export(
    fun: Lifted[..., Any],
    *,
    platforms: str | Sequence[str] | None = None,
    disabled_checks: Sequence[jax.export.DisabledSafetyCheck] = (),
) -> Callable[..., Exported]:
    """Lowers a function to a program that can be saved in a file and called without its code.

    The counterpart of ``jax.export.export`` for functions and methods of
    :func:`~nnx_sharding.jit` and :func:`~nnx_sharding.shard_map`.

    Args:
      fun: the function, or a bound method, as the decorator returned it.
      platforms: the platforms to lower for, among ``"cpu"``, ``"cuda"``, ``"rocm"`` and ``"tpu"``;
        None for the current one. They need not be present.
      disabled_checks: checks of ``jax.export`` to leave out.

    Returns:
      A function that takes the arguments of ``fun``, which may be abstract, and returns an
      :class:`Exported`. Nothing is run, and no argument is changed.

    Raises:
      TypeError: ``fun`` was not returned by ``jit`` or ``shard_map``; an argument holds a
        ``jax.Ref`` or a Variable made with ``hijax=True``, whose identity a file cannot keep.
      ValueError: the function changes its arguments in a way that arrays by path cannot express,
        such as a static attribute; a platform is ``"gpu"``; or what ``lower`` raises.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import export, jit
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> forward = jit(lambda model, x: model(x))
      >>> file = tempfile.mkdtemp() + "/forward.zip"
      >>> export.export(forward)(model, jnp.ones((4, 2))).save(file)
      >>> output, updates = export.load(file).call(nnx.state(model), jnp.ones((4, 2)))
      >>> output.shape, updates
      ((4, 3), {})
    """
    if not isinstance(fun, Lifted):
        raise TypeError(
            "export takes a function that nnx_sharding.jit or shard_map returned, not "
            f"{show(fun)}. For a function of jax.jit use jax.export.export."
        )
    names = (platforms,) if isinstance(platforms, str) else platforms
    if names is not None and "gpu" in names:
        raise ValueError("a program is for one kind of GPU: write 'cuda' or 'rocm', not 'gpu'.")

    @_compat.api_boundary
    def for_arguments(*args: Any, **kwargs: Any) -> Exported:
        """Traces and lowers the function for these arguments."""
        plan, flat = fun._plan_without_running(args, kwargs)
        _check_refs(plan, flat.leaves)
        # One type for each array of the arguments, with its sharding.
        types = list(map(_type_of, flat.leaves, plan.shardings, plan.specs))
        lower = jax.export.export(
            plan.program.staged, platforms=names, disabled_checks=disabled_checks
        )
        # Without the lines of sources, so that equal functions make equal files.
        with _compat.no_source_locations(), fun._tracing(flat):
            lowered = call_with_explained_errors(plan, types, lower)
        # The traced function returns groups of outputs, one for each sharding, and the outcome,
        # which holds no arrays. Unflattened with numbers in place of arrays, the groups have the
        # positions of the outputs.
        num_outputs = lowered.out_tree.num_leaves
        positions = range(num_outputs)
        *groups, outcome = jax.tree_util.tree_unflatten(lowered.out_tree, positions)
        # A file can hold no outcome: its program returns a tuple of arrays, and the manifest says
        # what they mean.
        out_tree = jax.tree_util.tree_structure((0,) * num_outputs)
        program = dataclasses.replace(lowered, out_tree=out_tree)
        return Exported(_manifest(plan, outcome, groups, program), program)

    return for_arguments


def _check_refs(plan: Plan, leaves: Sequence[Any]) -> None:
    """Raises an error that lists the arguments that only refer to an array."""
    refs = {slot for slot, leaf in enumerate(leaves) if _compat.is_ref(leaf)}
    refs |= plan.structure.slots_of(RefEntry)
    lines = [f"  {plan.names[slot]}: {type(leaves[slot]).__name__}" for slot in sorted(refs)]
    head = f"{plan.fun_name} cannot be exported with these arguments, whose identity no file keeps:"
    raise_listed(TypeError, head, lines, "Use Variables that hold arrays.")


def _type_of(leaf: Any, sharding: Any, spec: Any) -> Any:
    """Returns the type of an argument, with its declared sharding or else its own."""
    is_open = sharding is None and spec is None
    return abstract(leaf, leaf.sharding if is_open and is_committed(leaf) else sharding)


def _arguments_after(plan: Plan, outcome: Outcome) -> Structure:
    """Describes the arguments after the call: all modules and Variables, and where arrays are.

    In the outcome, objects that did not change have no entry, and the slots of others are those of
    outputs. Here each object has an entry. An unchanged one gets the slots of its inputs, inverted
    (``~slot`` is negative), so that the sign says whether an array is an input or an output.
    """
    before, after = plan.structure, outcome.structure
    entries, slots = list(after.entries), list(after.slots)
    for index, entry in enumerate(before.entries):
        if entries[index] is None:  # unchanged
            entries[index] = entry
            slots[index] = tuple(~slot for slot in before.slots[index])
    root_slots = tuple(~slot for slot in before.root_slots)
    return Structure(tuple(entries), before.root, tuple(slots), root_slots, before.statics)


def _check_expressible(
    plan: Plan, outcome: Outcome, arguments: Structure, *, keeps_paths: bool
) -> None:
    """Raises a ValueError for changes of the arguments that arrays by path cannot express.

    Args:
      plan: that of the call.
      outcome: what the function changed.
      arguments: their structure after the call, to list the differences.
      keeps_paths: whether all paths to arrays are still there. One is not if the function has put a
        Variable of another path in its place, or removed its value.
    """
    before, after = plan.structure, outcome.structure
    # Changed metadata of Variables, static objects that were changed, and removed attributes are
    # nothing that a file can say. New values of Variables are not among these changes.
    can_be_said = keeps_paths and not outcome.metadata and not outcome.statics
    for change in outcome.nodes:
        if change.removed:
            can_be_said = False
        old_attributes = parts_of(before.entries[change.node])
        for name, value in change.changed:
            # Flax notes in `STATUSES` which attributes are data: it changes with each new one.
            if name != _compat.STATUSES:
                old = old_attributes.get((name,))
                can_be_said &= _can_be_said(old, value.child, before, after)
    if can_be_said:
        return
    lines = differences((plan.signature, before), (plan.signature, arguments))
    # By path, exchanged modules look the same if they differ in their arrays only.
    lines = lines or ["modules that look alike are exchanged"]
    text = message(
        f"{plan.fun_name} cannot be exported, because it changes more than arrays:",
        [f"  {line}" for line in lines],
        "A program in a file returns only values of Variables, and added Variables. "
        "Make these changes outside the function, or keep what changes in a Variable.",
    )
    raise ValueError(text)


def _can_be_said(old: Child | None, new: Child, before: Structure, after: Structure) -> bool:
    """Whether a changed attribute of a module is the same as new arrays at paths below it.

    That is all that a file can say: ``model.up.kernel`` is now output 3. An attribute is described
    by the index of an object among the ``entries`` of a structure, by ``LEAF`` for an array, by a
    ``Container``, or by a static value.

    Args:
      old: the attribute before the call; None if the module did not have it.
      new: the attribute after the call.
      before: the structure of the arguments before the call.
      after: the same after it; objects that the function made come after those of ``before``.
    """
    if old is not None:
        if isinstance(old, int) and isinstance(new, int) and old != new:
            # Another Variable in its place, of the same kind and metadata: at this path, there is
            # only another value.
            entry = before.entries[old]
            return isinstance(entry, VariableEntry) and entry == after.entries[new]
        return old == new  # with other arrays, if any
    # A new attribute.
    if isinstance(new, Container):
        return all(_can_be_said(None, child, before, after) for child in new.children)
    # An object of the arguments would be shared now, and a static value is no array.
    is_made_by_function = isinstance(new, int) and new >= len(before.entries)
    return new is LEAF or is_made_by_function


def _manifest(
    plan: Plan, outcome: Outcome, groups: Sequence[Any], program: jax.export.Exported
) -> Manifest:
    """Describes the arguments, the result and the changes of a program as data.

    A *tree* is such data for a pytree, in which arrays are ``{"input": 3}`` or ``{"output": 0}``.

    Args:
      plan: that of the call.
      outcome: what the function returned and changed.
      groups: the outputs of the traced function in its own groups, as positions in the program.
      program: the program.
    """

    def tree_of_slot(slot: int) -> Tree:
        """Returns the tree of an array after the call: an output, or an unchanged input."""
        if slot < 0:  # `_arguments_after` has inverted the slots of unchanged objects
            return {"input": ~slot}
        group, position = outcome.sources[slot]
        if group == INPUT:  # an array that is unchanged, in an object that is not
            return {"input": position}
        return {"output": groups[group].arrays[position]}

    # The arguments, before and after the call.
    arguments = tuple(_arguments(plan, tree_of(plan.structure, lambda slot: {"input": slot})))
    structure_after = _arguments_after(plan, outcome)
    arguments_after = _arguments(plan, tree_of(structure_after, tree_of_slot))
    updates, keeps_paths = {}, True
    for before, after in zip(arguments, arguments_after, strict=True):
        old_arrays, new_arrays = _arrays_by_path(before.tree), _arrays_by_path(after.tree)
        keeps_paths &= old_arrays.keys() <= new_arrays.keys()
        # An output is a new array, and an input one that was at another path.
        changed = [
            (path, array) for path, array in new_arrays.items() if old_arrays.get(path) != array
        ]
        if changed:
            updates[after.name] = tree_from("state", changed)
    _check_expressible(plan, outcome, structure_after, keeps_paths=keeps_paths)
    # The result, and the types and shardings of the program.
    result = tree_of(outcome.structure, tree_of_slot)
    inputs, outputs = _compat.exported_shardings(program)
    meshes = meshes_of((*inputs, *outputs))
    output_names = [f"output {i}" for i in range(len(outputs))]
    info_of = functools.partial(ArrayInfo.of, meshes=meshes)
    versions = {name: metadata.version(name) for name in ("flax", "jax")}
    return Manifest(
        function=plan.fun_name,
        transform=plan.transform.name,
        arguments=arguments,
        static=_statics(plan),
        inputs=tuple(map(info_of, plan.names, program.in_avals, inputs)),
        outputs=tuple(map(info_of, output_names, program.out_avals, outputs)),
        result=result,
        updates=updates,
        devices=program.nr_devices,
        meshes=tuple(map(MeshDescription.of, meshes)),
        platforms=tuple(program.platforms),
        calling_convention=program.calling_convention_version,
        versions={**versions, "nnx_sharding": __version__},
    )


def _arrays_by_path(tree: Tree) -> dict[Path, Tree]:
    """Returns each array in a tree, as ``{"input": 3}`` or ``{"output": 0}``, by its path."""
    return {path: {kind: position} for path, kind, position in leaves_of(tree)}


def _arguments(plan: Plan, tree: Tree) -> Iterator[Argument]:
    """Yields the arguments of a call.

    ``tree`` is that of all of them, a tuple and a dict, in which parts come after their paths:
    ``{"tuple": [[[0], {"tuple": positional}], [[1], {"dict": keywords}]]}``.
    """
    signature = plan.signature
    (_, positional), (_, keywords) = tree["tuple"]
    # Static arguments are not in the tree, so the indices skip them.
    for index, (_, argument) in zip(signature.dynamic, positional["tuple"], strict=True):
        name, is_donated = signature.names[index], index in signature.donated
        yield Argument(name, keyword=False, donated=is_donated, tree=argument)
    for (name,), argument in keywords["dict"]:
        yield Argument(name, keyword=True, donated=name in signature.donated, tree=argument)


def _statics(plan: Plan) -> dict[str, str]:
    """Returns the text of each static argument, the same in each process."""
    pairs = sorted(zip(plan.signature.static_names, plan.structure.statics, strict=True))
    return {name: show_child(plan.structure, child) for name, child in pairs}
