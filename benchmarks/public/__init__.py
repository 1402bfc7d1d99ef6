"""Public NNX models under the strategies: ``python -m benchmarks.public`` writes docs/models.md.

    registry.py   the models: how one is made at a size, its batch and its loss; nothing of theirs
                  is copied
    measures.py   what is measured of one model: a column of the page each
    page.py       the page from the results
    __main__.py   runs each measure of each model in a process of its own, with a time limit

The results are kept in benchmarks/results/public_models.json, so the page can be made anew for some
models. A measure that fails or takes too long is a result, too: its reason is in the page.
"""
