"""Checks of the values that a step of a loop passes on, and of the objects that branches leave.

JAX compares pytrees of arrays. A step of ours may also return another module than it was given,
change attributes, or write an array of another shape to a Variable. These functions say where, with
the user's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import jax
from jax.sharding import PartitionSpec

from .. import _compat
from ..core.constrain import type_spec
from ..core.structure import Structure, parts_of
from ..diagnostics.differences import show_child
from ..errors import raise_if_any, see
from ..specs.paths import accessor, path_key
from .in_trace import is_array, tree_text, type_text


def check_carry(name: str, fun_name: str, given: object, returned: object) -> None:
    """Raises an error unless a returned carry has the form and the objects of the given one.

    Args:
      name: the name of the transform, for messages.
      fun_name: the name of the function.
      given: the carry that the function got.
      returned: the carry that the function returned.

    Raises:
      TypeError: the pytrees differ.
      ValueError: the returned carry has other modules or Variables.
    """
    is_object = _compat.is_graph_object
    # Modules, Variables and arrays are the leaves of both pytrees.
    given_leaves, given_treedef = jax.tree_util.tree_flatten_with_path(given, is_leaf=is_object)
    returned_leaves, returned_treedef = jax.tree_util.tree_flatten(returned, is_leaf=is_object)
    if given_treedef != returned_treedef:  # type: ignore[operator]
        error = TypeError(
            f"{name}: {fun_name} returns a carry of a different structure than it was given:\n"
            f"  given: {tree_text(given)}\n  returned: {tree_text(returned)}"
        )
        raise see(error, anchor="carry-of-another-form")
    replaced = [
        f"  carry{accessor('', tuple(map(path_key, path)))}: {type(old).__name__}"
        for (path, old), new in zip(given_leaves, returned_leaves, strict=True)
        # Objects are compared by identity, because the caller keeps its own objects, and would not
        # see changes of others.
        if old is not new and (is_object(old) or is_object(new))
    ]
    head = f"{name}: {fun_name} returns different objects in the carry than it was given:"
    raise_if_any(
        ValueError, head, replaced, "Change the module that it was given, and return that."
    )


def type_changes(
    names: Iterable[str], before: Iterable[object], after: Iterable[object]
) -> list[str]:
    """Returns a line for each array that another one of other shape or dtype has replaced.

    Args:
      names: the expressions for the arrays, such as ``carry[0].kernel``.
      before: the arrays that a step was given.
      after: the arrays that the step left in their places.
    """
    lines = []
    # `zip` is not strict, because the carry of a loop ends with arrays that no step can change, and
    # that have no name here.
    for name, old, new in zip(names, before, after, strict=False):
        # An array that a step does not write is the same object, so its type is not looked at.
        if old is not new and is_array(old) and is_array(new):
            old_type, new_type = jax.typeof(old), jax.typeof(new)
            # A hijax type has no shape and no dtype, so no change is found. JAX compares them.
            has_other_shape = getattr(old_type, "shape", None) != getattr(new_type, "shape", None)
            has_other_dtype = getattr(old_type, "dtype", None) != getattr(new_type, "dtype", None)
            # JAX promotes an array of a weak type, such as a Python number, to the new dtype.
            is_promoted = getattr(old_type, "weak_type", False)
            if has_other_shape or (has_other_dtype and not is_promoted):
                lines.append(f"  {name}: {type_text(old)} → {type_text(new)}")
    return lines


def sharding_changes(
    names: Iterable[str], before: Iterable[object], after: Iterable[object]
) -> tuple[list[str], str]:
    """Returns a line for each array whose sharding changed on Explicit axes, and the remedy.

    The sharding on Explicit axes is a part of the type, which JAX's loops keep. The compiler keeps
    that on Auto axes, so it is not compared.

    Args:
      names: the expressions for the arrays, such as ``carry[0].kernel``.
      before: the arrays that a step was given.
      after: the arrays that the step left in their places, of the same shapes.
    """
    lines, specs = [], []
    for name, old, new in zip(names, before, after, strict=False):  # as in `type_changes`
        old_spec, new_spec = type_spec(old), type_spec(new)
        # None: no axis is Explicit, or the array is on no mesh. Then JAX compares no shardings.
        if old_spec is not None and new_spec is not None and old_spec != new_spec:
            lines.append(f"  {name}: {type_text(old)} → {type_text(new)}")
            specs.append(old_spec)
    return lines, resharding_remedy("in the step", specs[0]) if specs else ""


def resharding_remedy(place: str, spec: PartitionSpec) -> str:
    """Returns what to do about arrays whose types differ in their shardings only.

    Args:
      place: where the array can be resharded, such as ``in the step``.
      spec: the spec that the first of the arrays should have.
    """
    return (
        "On Explicit axes the sharding is a part of the type. Declare what the module returns, "
        f"activation_shardings={{path: {spec}}}, or write jax.sharding.reshard(x, {spec}) {place}. "
        "Or let the compiler choose: jit(..., auto_axes=True), with out_shardings."
    )


def structure_changes(
    names: Mapping[int, str], old_structure: Structure, new_structure: Structure
) -> Iterator[tuple[str, str, str]]:
    """Yields each place where two structures of the same objects differ.

    Args:
      names: the expression for each object to compare, by its index in both structures.
      old_structure: the structure that a function was given. The *entry* of an object describes it.
      new_structure: the structure that the function left, with the same objects first.

    Yields:
      A triple for each attribute or item that differs: its place, and a text for what is there in
      each structure, such as ``("model.scale", "nothing", "an array")`` for a new attribute. The
      texts are equal if another object of the same kind is there.
    """
    for index, name in names.items():
        old_entry = old_structure.entries[index]
        new_entry = new_structure.entries[index]
        # An entry is None for an object that cannot change: without graph updates, a module after a
        # call.
        if old_entry == new_entry or old_entry is None or new_entry is None:
            continue
        # Both have the attributes (or items) of the object, by path. A value is a static value, a
        # mark for an array, or the index of another object; it is never None.
        old_parts, new_parts = parts_of(old_entry), parts_of(new_entry)
        changed = [
            path
            for path in dict.fromkeys([*old_parts, *new_parts])
            if old_parts.get(path) != new_parts.get(path)
        ]
        # Flax records which attributes hold data. The record changes together with attributes, so
        # it is named only if nothing else has changed.
        by_user = [path for path in changed if path != (_compat.STATUSES,)]
        for path in by_user or changed:
            # The texts are, for example, "an array", "a Linear" or the static value.
            old_text = new_text = "nothing"
            if path in old_parts:
                old_text = show_child(old_structure, old_parts[path])
            if path in new_parts:
                new_text = show_child(new_structure, new_parts[path])
            yield accessor(name, path), old_text, new_text
