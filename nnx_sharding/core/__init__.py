"""The pipeline behind the transforms, in the order in which a call flows through it.

``guard`` (is this still the graph that was split? then ``run`` comes next) → ``arguments`` (which
parameter is which) → ``split`` (graph to structure and arrays) → ``resolve`` (one spec per array) →
``plan`` (the pure function in the hands of JAX) → ``run`` (place, execute, write back) → ``merge``
(arrays to graph), with ``lifted`` as the callable and ``stages`` as the objects that users hold.
"""
