"""Training of large language models with PyTorch: a plain model, a plan of how to spread it, a run that goes on.

Nothing is imported here: each command loads only what it needs.
"""

__version__ = "0.1.0"
