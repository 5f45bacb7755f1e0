"""The op table: everything the model computes with, one line per op.

The reference in `tinfer.compat` is the contract (its docstring gives shapes, dtypes, numerics);
the registry decides at each call whether the Triton kernel of the same name runs instead.
"""

from tinfer.registry import Op

__all__ = ["Op"]
