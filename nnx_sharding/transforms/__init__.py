"""The transforms: what ``jit`` and ``shard_map`` each decide, and the stages of both."""

from .._compat import hide_frames_of

hide_frames_of(__path__[0])
