"""Gluon functions that were renamed between the versions of Triton that are supported."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
view = (
    getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret
)
