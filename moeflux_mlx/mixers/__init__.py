"""Ways of mixing tokens, each in a folder of its own: what it is (`spec`), computes (`op`), keeps (`cache`), and how a
layer uses it (`module`). Only `registry` and the readers of configurations name them.
"""
