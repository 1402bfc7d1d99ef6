"""Exports a function of ``jit`` or ``shard_map``.

A program takes and returns a list of arrays. The trace tells what they mean: the *plan* of a call
has the *structure* of its arguments (``core/structure.py``), and the *outcome* has the structure of
what the function returned and changed. A structure describes modules without their arrays; the
*slot* of an array is its index in the list. JAX lowers the program, and the *manifest* writes both
structures down as data: which array of the arguments is which input, and which output is which part
of the result or a new value of which argument. Such data cannot express every change, for example
of a static attribute, and a change that it cannot express is an error.

A *child* describes a part of a pytree in a structure: the index of an object among its ``entries``,
`LEAF` for an array, a `Container` with further children, or a static value. The ``slots`` of a
structure have the slots of the arrays of each object, by the same index, and its ``root_slots``
those of arrays outside of objects. A *tree* is the same pytree as data (``manifest.py``).

In an `Outcome`, ``nodes`` are the modules with changed attributes: for each, the index (``node``),
the names and new values of attributes that are new or ``changed``, and those ``removed``.
``metadata`` and ``statics`` are the indices of Variables with other metadata, and of static objects
that were changed in place. ``sources`` say for each slot after the call where the array comes from:
a pair of `INPUT` and the slot before the call, or of a group of outputs and a position in it.
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
from ..errors import message, raise_if_any
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

    It is the counterpart of ``jax.export.export`` for functions and methods of
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
        # ``plan.shardings`` and ``plan.specs`` have an item for each of these arrays, by slot.
        _check_refs(plan, flat.leaves)  # raises if an argument only refers to an array
        # Each array of the arguments has a type here, with its sharding.
        types = list(map(_type_of, flat.leaves, plan.shardings, plan.specs))
        lower = jax.export.export(
            plan.program.staged, platforms=names, disabled_checks=disabled_checks
        )
        # The lines of sources are left out, so that equal functions make equal files.
        with _compat.no_source_locations(), fun._tracing(flat):
            lowered = call_with_explained_errors(plan, types, lower)
        # The traced function returns groups of outputs, one for each sharding, and the outcome,
        # which holds no arrays. They are unflattened with numbers in place of arrays, so that the
        # groups have the positions of the outputs.
        num_outputs = lowered.out_tree.num_leaves
        positions = range(num_outputs)
        *groups, outcome = jax.tree_util.tree_unflatten(lowered.out_tree, positions)
        # A file can hold no outcome, so its program returns a tuple of arrays, and the manifest
        # says what they mean.
        out_tree = jax.tree_util.tree_structure((0,) * num_outputs)
        program = dataclasses.replace(lowered, out_tree=out_tree)
        return Exported(_manifest(plan, outcome, groups, program), program)

    return for_arguments


def _check_refs(plan: Plan, leaves: Sequence[Any]) -> None:
    """Raises a ``TypeError`` for arguments that only refer to an array."""
    refs = {slot for slot, leaf in enumerate(leaves) if _compat.is_ref(leaf)}
    refs |= plan.structure.slots_of(RefEntry)
    lines = [f"  {plan.names[slot]}: {type(leaves[slot]).__name__}" for slot in sorted(refs)]
    head = f"{plan.fun_name} cannot be exported with these arguments, whose identity no file keeps:"
    raise_if_any(TypeError, head, lines, "Use Variables that hold arrays.")


def _type_of(leaf: Any, sharding: Any, spec: Any) -> Any:
    """Returns the type of an argument, with its declared sharding, or else with its own.

    Args:
      sharding: the sharding that is declared for it; None if JAX gets none.
      spec: the spec that is declared for it; None if there is none. An array has its own sharding
        only if both are None, and if it has to stay on its devices.
    """
    is_open = sharding is None and spec is None
    return abstract(leaf, leaf.sharding if is_open and is_committed(leaf) else sharding)


def _arguments_after(plan: Plan, outcome: Outcome) -> Structure:
    """Returns the structure of the arguments after the call, with all modules and Variables.

    In the outcome, an object that did not change has no entry, and slots of others are those of
    outputs. Here each object has an entry. An unchanged object gets the slots of its inputs,
    inverted (``~slot`` is negative), so that the sign says whether an array is an input or output.
    """
    structure_before, structure_after = plan.structure, outcome.structure
    entries, slots = list(structure_after.entries), list(structure_after.slots)
    for index, entry in enumerate(structure_before.entries):
        if entries[index] is None:  # unchanged
            entries[index] = entry
            slots[index] = tuple(~slot for slot in structure_before.slots[index])
    root_slots = tuple(~slot for slot in structure_before.root_slots)
    return Structure(
        tuple(entries), structure_before.root, tuple(slots), root_slots, structure_before.statics
    )


def _check_expressible(
    plan: Plan, outcome: Outcome, arguments: Structure, *, keeps_paths: bool
) -> None:
    """Raises a ``ValueError`` for changes of the arguments that arrays by path cannot express.

    Args:
      arguments: the structure of the arguments after the call, for the list of differences.
      keeps_paths: whether all paths to arrays are still there. A path is gone if the function has
        put a Variable of another path in its place, or removed its value.
    """
    if keeps_paths and _is_expressible(plan.structure, outcome):
        return
    lines = differences((plan.signature, plan.structure), (plan.signature, arguments))
    # By path, exchanged modules look the same if they differ in their arrays only.
    lines = lines or ["modules that look alike are exchanged"]
    text = message(
        f"{plan.fun_name} cannot be exported, because it changes more than arrays:",
        [f"  {line}" for line in lines],
        "A program in a file returns only values of Variables, and added Variables. "
        "Make these changes outside the function, or keep what changes in a Variable.",
    )
    raise ValueError(text)


def _is_expressible(structure_before: Structure, outcome: Outcome) -> bool:
    """Whether a file can express all changes of an outcome as arrays by path.

    A file cannot express changed metadata of Variables, changed static objects, and removed
    attributes. New values of Variables are not among the changes that an outcome lists.
    """
    if outcome.metadata or outcome.statics:
        return False
    for change in outcome.nodes:
        if change.removed:
            return False
        old_attributes = parts_of(structure_before.entries[change.node])  # path → child
        for name, value in change.changed:
            # Flax records in `STATUSES` which attributes are data, so it changes with each new one.
            if name == _compat.STATUSES:
                continue
            old_child = old_attributes.get((name,))
            if not _is_child_expressible(
                old_child, value.child, structure_before, outcome.structure
            ):
                return False
    return True


def _is_child_expressible(
    old_child: Child | None,
    new_child: Child,
    structure_before: Structure,
    structure_after: Structure,
) -> bool:
    """Whether a changed attribute of a module is the same as new arrays at paths below it.

    A file can express only that: ``model.up.kernel`` is now output 3, for example. An attribute is
    described by the index of an object among the ``entries`` of a structure, by ``LEAF`` for an
    array, by a ``Container``, or by a static value.

    Args:
      old_child: the attribute before the call; None if the module did not have it.
      structure_before: the structure of the arguments before the call.
      structure_after: the structure after the call. Objects that the function made come after the
        others.
    """
    if old_child is not None:
        if isinstance(old_child, int) and isinstance(new_child, int) and old_child != new_child:
            # Another Variable of the same kind and metadata may take the place of the old one. At
            # this path there is only another value then.
            entry = structure_before.entries[old_child]
            return isinstance(entry, VariableEntry) and entry == structure_after.entries[new_child]
        return old_child == new_child  # equal descriptions may have other arrays
    # The attribute is new.
    if isinstance(new_child, Container):
        return all(
            _is_child_expressible(None, child, structure_before, structure_after)
            for child in new_child.children
        )
    # An object of the arguments would be shared now, and a static value is no array, so only arrays
    # and objects that the function made are left.
    is_made_by_function = isinstance(new_child, int) and new_child >= len(structure_before.entries)
    return new_child is LEAF or is_made_by_function


def _manifest(
    plan: Plan, outcome: Outcome, groups: Sequence[Any], program: jax.export.Exported
) -> Manifest:
    """Returns a description of the arguments, the result and the changes of a program, as data.

    Raises a ``ValueError`` for changes that it cannot express.

    A *tree* is such data for a pytree, in which arrays are ``{"input": 3}`` or ``{"output": 0}``.

    Args:
      groups: the outputs of the traced function in its own groups, as positions in the program.
    """

    def tree_of_slot(slot: int) -> Tree:
        """Returns the tree of an array after the call: an output, or an unchanged input."""
        if slot < 0:  # `_arguments_after` has inverted the slots of unchanged objects
            return {"input": ~slot}
        group, position = outcome.sources[slot]
        if group == INPUT:  # an unchanged array in an object that has changed
            return {"input": position}
        return {"output": groups[group].arrays[position]}

    # `arguments` and `arguments_after` describe them before and after the call.
    arguments = tuple(_arguments(plan, tree_of(plan.structure, lambda slot: {"input": slot})))
    structure_after = _arguments_after(plan, outcome)
    arguments_after = tuple(_arguments(plan, tree_of(structure_after, tree_of_slot)))
    updates, keeps_paths = _updates(arguments, arguments_after)
    # Raises if a file cannot express the changes.
    _check_expressible(plan, outcome, structure_after, keeps_paths=keeps_paths)
    # The rest is the result, and the types and shardings of the program.
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


def _updates(
    arguments: Sequence[Argument], arguments_after: Sequence[Argument]
) -> tuple[dict[str, Tree], bool]:
    """Returns what a call changes in each argument, and whether all paths of arrays are left."""
    updates = dict[str, Tree]()
    keeps_paths = True
    for before, after in zip(arguments, arguments_after, strict=True):
        old_arrays, new_arrays = _arrays_by_path(before.tree), _arrays_by_path(after.tree)
        if not old_arrays.keys() <= new_arrays.keys():
            keeps_paths = False
        # A changed array is an output, if it is new, or an input that was at another path.
        changed = [
            (path, array) for path, array in new_arrays.items() if old_arrays.get(path) != array
        ]
        if changed:
            updates[after.name] = tree_from("state", changed)
    return updates, keeps_paths


def _arrays_by_path(tree: Tree) -> dict[Path, Tree]:
    """Returns each array in a tree, as ``{"input": 3}`` or ``{"output": 0}``, by its path."""
    return {path: {kind: position} for path, kind, position in leaves_of(tree)}


def _arguments(plan: Plan, tree: Tree) -> Iterator[Argument]:
    """Yields the arguments of a call.

    ``tree`` is the tree of all of them, a tuple and a dict, whose parts come after their paths:
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
    """Returns the text of each static argument by name. The text is the same in each process."""
    pairs = sorted(zip(plan.signature.static_names, plan.structure.statics, strict=True))
    return {name: show_child(plan.structure, child) for name, child in pairs}
