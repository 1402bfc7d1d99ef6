"""The pipeline behind the transforms, in the order in which a call flows through it.

``arguments`` (which parameter is which) → ``split`` (graph to structure and arrays) →
``resolve`` (one sharding per array) → ``plan`` (the pure function and its write-back) →
``merge`` (arrays to graph), with ``lifted`` as the callable that users hold.
"""

from .. import errors, state_sharding
from .._compat import hide_frames_of

for _path in (__path__[0], errors.__file__, state_sharding.__file__):
    hide_frames_of(_path)
