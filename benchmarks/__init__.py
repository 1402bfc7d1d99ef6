"""What the library costs, against the least that JAX can do and against other ways to call."""
