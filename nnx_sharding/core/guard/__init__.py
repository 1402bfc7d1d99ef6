"""Recognises calls whose graph is that of an earlier call, without splitting it."""
