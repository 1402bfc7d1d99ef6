"""Explains failed calls, unlikely specs and retraces, from the data that the core gives."""
