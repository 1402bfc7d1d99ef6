"""``functools.cached_property``, without the lock that it has in Python 3.11.

That lock is one for all objects of a class, and it is held while the value is computed. If the
garbage collector runs then, and the finalizer of a user's object waits for a thread that calls
another transformed function, neither goes on. From Python 3.12 on there is no lock.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    cached_property = functools.cached_property
else:

    class cached_property(functools.cached_property):
        """A method whose result becomes an attribute of its object."""

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            """Computes the attribute, which Python then finds before this descriptor."""
            if instance is None:
                return self
            # Two threads may compute it at the same time. Both then use the first value.
            return vars(instance).setdefault(self.attrname, self.func(instance))


__all__ = ["cached_property"]
