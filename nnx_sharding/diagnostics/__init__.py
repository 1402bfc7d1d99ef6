"""Explains failed calls, unlikely specs and retraces."""
