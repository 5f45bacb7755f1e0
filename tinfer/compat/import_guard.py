"""Keep TileLang out of every process that imports tinfer.

tinfer's promise is Triton alone. `tilelang`, `tile_kernels` and `tvm_ffi` load native
libraries at import that clash with other runtimes and fail on hosts without CUDA, so an
accidental import (by a plug-in, or by a library that probes for them) must fail at once
and by name. `import tinfer` installs the guard before anything else; a spawned worker
imports tinfer to unpickle its target and is guarded the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

BARRED = frozenset({"tilelang", "tile_kernels", "tvm_ffi"})


def _importer(frame: FrameType | None) -> str:
    """The first caller outside the import machinery, as `file:line`."""
    while frame is not None:
        name = frame.f_code.co_filename
        if "importlib" not in name and name != __file__:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


class ImportGuard:
    """A `sys.meta_path` finder that refuses the barred top-level packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in BARRED:
            raise ImportError(
                f"{fullname!r} must not load in a process that uses tinfer "
                f"(imported by {_importer(sys._getframe(1))}); tinfer runs on Triton alone",
                name=fullname,
            )
        return None


def install() -> None:
    """Install the guard; raise ImportError if a barred package is already loaded."""
    loaded = sorted(m for m in sys.modules if m.partition(".")[0] in BARRED)
    if loaded:
        raise ImportError(
            f"{loaded[0]!r} was loaded before tinfer; import tinfer first, or do not import it "
            "in this process: tinfer runs on Triton alone",
            name=loaded[0],
        )
    if not any(isinstance(finder, ImportGuard) for finder in sys.meta_path):
        sys.meta_path.insert(0, ImportGuard())  # type: ignore[arg-type]
