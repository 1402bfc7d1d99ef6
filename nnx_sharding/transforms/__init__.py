"""Transforms of JAX within a trace, for functions that take and return NNX objects."""
