"""Several processes of one program on this machine, as a scheduler starts them on a cluster.

``supervise`` starts and watches them, ``environment`` is what JAX finds in each, ``worker`` runs
the program there, ``output`` shows what they write, ``ending`` sees to it that none is left.
"""

from .supervise import launch

__all__ = ["launch"]
