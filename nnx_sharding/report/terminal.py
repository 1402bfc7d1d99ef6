"""Pictures for the terminal of meshes and of the shards of arrays.

Both functions print to the given ``rich.console.Console``, else to standard output. Tables and
reports are objects that such a console prints itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from ..analysis.meshes import MeshDescription
from .grids import array_pictures, mesh_pictures

if TYPE_CHECKING:
    from rich.console import Console


def show_mesh(mesh: Mesh | AbstractMesh, *, console: Console | None = None) -> None:
    """Prints a mesh: its axes, and the ids of its devices in a grid.

    Args:
      mesh: the mesh; an abstract one has no ids.
      console: where to print.

    Example:
      >>> import jax
      >>> from nnx_sharding.report.terminal import show_mesh
      >>> show_mesh(jax.make_mesh((2, 4), ("data", "model")))
      ... # doctest: +NORMALIZE_WHITESPACE
      mesh data 2 (Explicit) × model 4 (Explicit)
              model 0  model 1  model 2  model 3
       data 0    0        1        2        3
       data 1    4        5        6        7
    """
    _print(lambda _: mesh_pictures(MeshDescription.of(mesh)), console)


def show_array(
    array: Any,
    sharding: Sharding | PartitionSpec | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    console: Console | None = None,
) -> None:
    """Prints which slice of an array each device holds.

    Like ``jax.debug.visualize_array_sharding``, but for arrays of any rank, also without data and
    on abstract meshes. An array that is partitioned in one or two dimensions is drawn as a grid of
    these, any other as a list.

    Args:
      array: an array, a ``jax.ShapeDtypeStruct``, or a shape.
      sharding: its sharding, or a spec; None uses that of the array.
      mesh: the mesh of a spec.
      console: where to print.

    Raises:
      TypeError: ``array`` is neither an array nor a shape.
      ValueError: the sharding is missing, or does not fit the shape.

    Example:
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> from nnx_sharding.report.terminal import show_array
      >>> show_array((64, 256), P("data", "model"), AbstractMesh((2, 2), ("data", "model")))
      ... # doctest: +NORMALIZE_WHITESPACE
      (64, 256) as P('data', 'model'); each device holds (32, 128)
                      0:128          128:256
       0:32   data=0, model=0  data=0, model=1
       32:64  data=1, model=0  data=1, model=1
    """
    shape = getattr(array, "shape", array)
    try:
        shape = tuple(map(int, shape))
    except (TypeError, ValueError):
        raise TypeError(f"array must be an array or a shape, got {array!r}.") from None
    sharding = getattr(array, "sharding", None) if sharding is None else sharding
    if isinstance(sharding, PartitionSpec):
        if mesh is None:
            raise ValueError(f"{sharding} has no mesh. Pass mesh=...")
        sharding = NamedSharding(mesh, sharding)
    if not isinstance(sharding, Sharding):
        raise ValueError("the array has no sharding. Pass sharding=..., and mesh=... for a spec.")
    _print(lambda width: array_pictures(shape, sharding, width), console)


def _print(pictures: Callable[[int], Iterable[Any]], console: Console | None) -> None:
    """Prints pictures in the width of the console."""
    from rich.console import Console

    console = Console() if console is None else console
    for picture in pictures(console.width):
        console.print(picture)
