"""The command line. The module of a command has ``add_commands(subparsers)``."""
