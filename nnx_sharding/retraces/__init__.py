"""Why a function was traced again: what differs from call to call.

``log`` (the traces of a function) → ``compare`` (two of them) → ``difference`` (two structures) →
``explain`` (what users are told); ``limits`` says when there are too many.
"""
