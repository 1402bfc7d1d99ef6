"""Whether a call can work, and what is behind an error of JAX that says it cannot.

``specs`` (do specs fit mesh and shapes) and ``captured`` (what a function takes from its
surroundings) run when a plan is made and when a function is traced; ``diagnose`` after JAX refused.
"""
