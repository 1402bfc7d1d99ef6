"""Ten programs after published ones, small, with the idioms of their authors.

Each module has

- ``make()``: the objects of one training run, models and optimizers;
- ``batch(step)``: the other arguments of a step;
- ``train_step(*objects, *batch)``: the function that is compiled, and ``OPTIONS`` of ``jit``;
- ``train(jit, objects, steps)``: the program itself, which returns what it computed. ``jit`` is
  ``flax.nnx.jit`` or ours;
- ``RULES``: specs by path, and ``LOGICAL`` mesh axes of names in the metadata, if it has any;
- ``shardings(strategy, *objects)``: the sharding of each object, and ``BATCH`` of the other
  arguments, where the objects are not a model and its optimizer, or not all is a batch.

``layers``, ``sampler`` and ``trainer`` are parts of them.
"""

import importlib

NAMES = [
    *("gemma", "qwen_lora", "clip", "unet", "vae"),
    *("ppo", "mla_moe", "gcn", "resnet", "griffin"),
]
PROGRAMS = {name: importlib.import_module(f".{name}", __name__) for name in NAMES}
