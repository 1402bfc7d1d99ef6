"""Says what to do if a checkpoint has other states of an optimizer than the model's.

An Optax transformation has a *state* for each part of a chain, such as ``opt_state/1/0`` of
``chain(clip, adam)``. A state has numbers, such as ``count``, and *moments*, which are trees of
arrays, one for each parameter of ``wrt``:

    1/opt_state/1/0/mu/body/kernel     the moments 1/opt_state/1/0/mu, of the parameter body/kernel

There are two cases. If all moments are in the same places, but of other parameters, only ``wrt``
differs. Otherwise the transformation is another one, and the same state may be in another place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..specs.paths import Path, accessor, path_string

_OPT_STATE = "opt_state"
_MAX_KEYS = 3  # the largest number of names of modules in a filter that a message proposes


def remedy_for_optimizer(
    missing: Collection[Path], found: Collection[Path], unread: Collection[str]
) -> str:
    """Returns what to do about states of an optimizer that a checkpoint lacks.

    Args:
      missing: the paths of the arrays that the checkpoint lacks, in the keys of NNX; at least one.
      found: the paths of the arrays of the model that the checkpoint has.
      unread: the paths of further arrays in the checkpoint.

    Returns:
      Sentences for the end of an error; an empty text unless all that is missing, and all that is
      unread, are states of an optimizer.
    """
    paths = (*map(path_string, missing), *unread)
    if any(_OPT_STATE not in path.split("/") for path in paths):
        return ""
    anew = "only=nnx.Not(nnx.PathContains('opt_state')): moments and schedules start anew"
    moments = {path: _moments(path) for path in (*missing, *found) if _OPT_STATE in path}
    trees_of_model = {path_string(tree) for tree in moments.values()}
    in_checkpoint = [*map(path_string, found), *unread]
    are_all_there = all(
        _is_below(in_checkpoint, path_string(tree)) for tree in map(_moments, missing)
    )
    if are_all_there and all(any(_is_below([x], tree) for tree in trees_of_model) for x in unread):
        parameters = [path[len(moments[path]) :] for path in missing]
        found_states = [path for path in found if _OPT_STATE in path]
        keep = _keep_moments(parameters, found_states)
        # Adam divides moments by 1 - b ** count, as if each had been averaged `count` times. With
        # b1 = 0.9, b2 = 0.999 and a large count, updates of new moments are 3 to 6 times as large.
        if any(path[-1] == "count" for path in found_states):
            keep += (
                " With the saved count, Adam's first updates of new moments are several times "
                "larger."
            )
        return (
            "The saved optimizer has moments of other parameters: its `wrt` was another one. "
            f"{keep} To keep none, pass {anew}."
        )
    text = (
        "The optimizer is of another Optax transformation than the saved one. Use that one, or "
        f"pass {anew}."
    )
    moved = _moved_state(missing, unread)
    return f"{text} To keep moments, {moved}" if moved else text


def _moments(path: Path) -> Path:
    """Returns the path of the moments that an array belongs to: up to the name of a field.

    Fields of states, such as ``mu``, are attributes, and parameters are keys of a dict in them.
    A number of a state, such as ``count``, is a field itself.
    """
    fields = [index for index, key in enumerate(path) if type(key) is str]
    return path[: fields[-1] + 1] if fields else path


def _is_below(paths: Iterable[str], tree: str) -> bool:
    """Whether any of the paths is of an array in the tree at the path ``tree``."""
    return any(path.startswith(f"{tree}/") for path in paths)


def _keep_moments(missing: Sequence[Path], found: Iterable[Path]) -> str:
    """Returns how to restore the moments that a checkpoint has, by a filter if names allow one.

    Args:
      missing: the paths of the parameters whose moments the checkpoint lacks.
      found: the paths of the states that it has.
    """
    others = {key for path in found for key in path}
    keys: dict[str, None] = {}  # one for each parameter, in order; empty if all are those of others
    for path in missing:
        own = [str(key) for key in path if isinstance(key, str) and key not in others]
        keys[own[0] if own else ""] = None
    filters = [f"nnx.PathContains({key!r})" for key in keys]
    if "" in keys or len(filters) > _MAX_KEYS:
        return (
            "To keep the others, restore into an optimizer with that `wrt`, `old`, and then call "
            "nnx.update(optimizer, nnx.state(old))."
        )
    either = filters[0] if len(filters) == 1 else f"nnx.Any({', '.join(filters)})"
    return (
        "To begin with zeros for the missing ones, and keep the others, pass "
        f"only=nnx.Not(nnx.All(nnx.PathContains('opt_state'), {either}))."
    )


def _moved_state(missing: Collection[Path], unread: Collection[str]) -> str:
    """Returns how to read the state that the checkpoint has in another place; empty if unknown.

    It is unknown unless exactly one place in the checkpoint has all arrays of the largest state.
    """
    arrays_of: dict[Path, list[str]] = {}  # state → the paths of its arrays in it
    for path in missing:
        state = _moments(path)[:-1]
        arrays_of.setdefault(state, []).append(path_string(path[len(state) :]))
    state = max(arrays_of, key=lambda state: len(arrays_of[state]))
    arrays, all_unread = arrays_of[state], {*unread}
    ending = f"/{arrays[0]}"
    places = [path.removesuffix(ending) for path in unread if path.endswith(ending)]
    places = [x for x in places if all_unread.issuperset(f"{x}/{array}" for array in arrays)]
    if len(places) != 1 or _OPT_STATE not in state:
        return ""
    depth = state.index(_OPT_STATE)
    *above, below = places[0].partition(_OPT_STATE)
    if "".join(above) != path_string(state[: depth + 1]):  # the state of another optimizer
        return ""
    value = accessor("optimizer.opt_state", state[depth + 1 :])
    for key in reversed(below.split("/")[1:]):
        value = f"{{{key if key.isdecimal() else repr(key)}: {value}}}"
    is_complete = len(arrays) == len(all_unread)
    rest = "" if is_complete else ", and only=..., because the checkpoint has more"
    return (
        "pass, instead of the optimizer, a dict that has them where the checkpoint has them: "
        f"{{'step': optimizer.step, 'opt_state': {value}}}{rest}."
    )
