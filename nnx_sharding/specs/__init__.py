"""How users write shardings: filters, mappings from filters to specs, and whether a spec fits."""
