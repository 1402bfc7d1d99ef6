"""Recognises calls with the graph of an earlier call, without flattening it."""
