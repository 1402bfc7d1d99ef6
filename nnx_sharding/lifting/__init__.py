"""The pipeline behind the transforms, in the order in which a call flows through it.

``arguments`` (which parameter is which) → ``split`` (graph to structure and arrays) →
``resolve`` (one sharding per array) → ``plan`` (the pure function and its write-back) →
``merge`` (arrays to graph), with ``lifted`` as the callable that users hold.
"""
