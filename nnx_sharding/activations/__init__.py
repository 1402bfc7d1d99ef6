"""The inputs and outputs of modules while a function is traced, and how they are sharded."""
