"""The command line. The module of each command has ``add_commands(subparsers)``."""
