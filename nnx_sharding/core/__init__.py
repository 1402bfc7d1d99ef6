"""The pipeline behind the transforms, in the order in which a call flows through it.

``guard`` (is the graph unchanged? then ``call`` is next) → ``signature`` (which argument is which)
→ ``flatten`` (graph to structure and arrays) → ``specs`` and ``resolve`` (one spec per array) →
``plan`` (the pure function, transformed by JAX) → ``call`` (place, execute, write back, with
``unflatten`` for arrays to graph). Users hold the callables of ``lifted`` and the objects of
``stages``.

The words of the pipeline are defined where the things are: *structure*, *entry*, *index*, *child*
and *slot* in ``structure.py``; *plan* and *fingerprint* in ``plan.py``; *outcome*, *group* and
*source* in ``outcome.py``; *recipe*, *walk* and *pin* in ``guard/recipe.py``.
"""
