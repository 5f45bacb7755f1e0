"""tinfer: DeepSeek-V4.1-Flash with Triton kernels alone."""

from tinfer.compat import import_guard as _import_guard

_import_guard.install()

__version__ = "0.1.0"
