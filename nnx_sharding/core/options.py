"""Checks of options that the transforms share, when a function is decorated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .. import _compat
from ..errors import NoMeshError
from .specs import Specs


def check_options(name: str, **options: tuple[Any, Sequence[Any]]) -> None:
    """Every option is one of its values.

    Args:
      name: the name of the transform.
      options: for each option its value, and those that it can have.

    Raises:
      ValueError: one is not.
    """
    for option, (value, values) in options.items():
        if value not in values:
            choice = ", ".join(map(repr, values))
            raise ValueError(f"{name}: {option} is one of {choice}, not {value!r}.")


def check_specs(name: str, kinds: Any = object, **options: Specs) -> None:
    """Everything in a prefix of specs is a spec.

    Args:
      name: the name of the transform.
      kinds: the types of specs that it takes, beside None.
      options: for each option its value.

    Raises:
      TypeError: something is not.
    """
    wrong = [f"  {option}{where}" for option, specs in options.items() for where in specs.invalid]
    wrong += [
        f"  {option}: {spec!r}: write its PartitionSpec"
        for option, specs in options.items()
        for spec in specs.written
        if spec is not None and not isinstance(spec, kinds)
    ]
    if wrong:
        raise TypeError(
            f"{name}: what stands here is no spec:\n"
            + "\n".join(wrong)
            + "\nUse a PartitionSpec such as P('data', None), a Sharding, a StateSharding, or None."
        )


def needing_devices(
    name: str, mesh: AbstractMesh, call: Callable[..., Any], *, from_arrays: bool
) -> Callable[..., Any]:
    """A call at top level with an abstract mesh, refused where nothing says on which devices.

    Args:
      name: the name of the transform.
      mesh: the mesh.
      call: takes the arrays.
      from_arrays: whether JAX takes the devices from arrays that lie on a concrete mesh.
    """

    def checked(*leaves: Any) -> Any:
        on_mesh = from_arrays and any(
            isinstance(getattr(leaf, "sharding", None), NamedSharding) for leaf in leaves
        )
        if not on_mesh and not isinstance(_compat.context_mesh(), Mesh):
            raise NoMeshError(
                f"{name}: there are no devices to run on: {mesh} is abstract. Pass a "
                "jax.sharding.Mesh, or call within `with jax.set_mesh(mesh):`. Without devices "
                "there are eval_shape, and trace(...).lower(lowering_platforms=...)."
            )
        return call(*leaves)

    return checked
