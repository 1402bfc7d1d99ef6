"""The command line, with each subcommand in a module of its own.

Such a module has ``add(subparsers, **common)``, which adds its parser and names ``run`` in it, and
``run(arguments)``, which returns the exit code.
"""
