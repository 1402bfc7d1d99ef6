"""The programs of ``tpu.programs`` as the compiler for GPUs writes them."""
