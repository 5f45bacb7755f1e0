"""Byte layouts of the paged caches: one class names each, and every writer and reader imports it.

A cache is a uint8 tensor `[num_pages, page_bytes]`; slot `s` is row `s % page_size` of page
`s // page_size`. Each row is `data_bytes` of codes and `scale_bytes` of scales, arranged either

    interleaved   row r: codes at r*row_bytes, its scales right behind
    block-split   row r: codes at r*data_bytes; scales at page_size*data_bytes + r*scale_bytes

which the triple (data_stride, scale_base, scale_stride) describes for any format:

    codes of row r   at  page*page_bytes + r*data_stride
    scales of row r  at  page*page_bytes + scale_base + r*scale_stride

Offsets pass 2^31 at slot 4,067,204 of the 528-byte rows: compute them in int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VALUES = ("e4m3", "e2m1", "bf16")
SCALES = ("ue8m0", "e4m3", "fp32", "fp32_pow2", "none")
# A cast taken before the row's own: name -> (group, scale) of an e2m1 quantize-dequantize.
FIRST_CASTS = {"none": (0, "none"), "index": (32, "ue8m0"), "compressed": (16, "e4m3")}


@dataclass(frozen=True)
class KVLayout:
    """How one cache stores its rows.

    `value` e4m3, e2m1 (two a byte, even channel in the low nibble) or bf16; `group` channels
    share one `scale` (0 when there is none). Scales take one byte (ue8m0, e4m3) or four (fp32;
    fp32_pow2 is an fp32 holding a power of two). `page_align` pads the page to a multiple of
    itself. `first` names the e2m1 cast that rows go through before their own, so that an fp8
    cache holds the values that the model computes with.
    """

    dim: int
    value: str
    group: int
    scale: str
    page_size: int
    interleaved: bool
    page_align: int = 1
    first: str = "none"

    def __post_init__(self) -> None:
        rules = {
            "dim": (self.dim > 0 and self.dim % 2 == 0, "positive and even", self.dim),
            "value": (self.value in VALUES, f"one of {VALUES}", self.value),
            "scale": (self.scale in SCALES, f"one of {SCALES}", self.scale),
            "page_size": (self.page_size > 0, "positive", self.page_size),
            "page_align": (self.page_align > 0, "positive", self.page_align),
            "first": (self.first in FIRST_CASTS, f"one of {tuple(FIRST_CASTS)}", self.first),
            "scale of a bf16 row": (
                (self.value == "bf16") == (self.scale == "none"),
                "none for bf16 values and only for them",
                f"{self.value} with {self.scale}",
            ),
            "group": (
                self.group == 0
                if self.scale == "none"
                else self.group > 0 and self.dim % self.group == 0,
                "a divisor of dim, or 0 without scales",
                self.group,
            ),
        }
        for name, (ok, rule, got) in rules.items():
            if not ok:
                raise ValueError(f"KVLayout: {name} must be {rule}, got {got}")

    @property
    def data_bytes(self) -> int:
        """Bytes of one row's codes."""
        return {"e4m3": self.dim, "e2m1": self.dim // 2, "bf16": 2 * self.dim}[self.value]

    @property
    def groups(self) -> int:
        """Scales per row."""
        return self.dim // self.group if self.group else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of one row's scales."""
        return self.groups * (4 if self.scale.startswith("fp32") else 1)

    @property
    def row_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes from one page to the next, padding included."""
        used = self.page_size * self.row_bytes
        return -(-used // self.page_align) * self.page_align

    @property
    def data_stride(self) -> int:
        return self.row_bytes if self.interleaved else self.data_bytes

    @property
    def scale_base(self) -> int:
        return self.data_bytes if self.interleaved else self.page_size * self.data_bytes

    @property
    def scale_stride(self) -> int:
        return self.row_bytes if self.interleaved else self.scale_bytes

    @property
    def triple(self) -> tuple[int, int, int]:
        """(data_stride, scale_base, scale_stride)."""
        return self.data_stride, self.scale_base, self.scale_stride

    def pages(self, rows: int) -> int:
        """Pages that hold `rows` rows."""
        return -(-rows // self.page_size)

    def allocate(self, num_pages: int, device: torch.device | str = "cpu") -> Tensor:
        """A cache of zero bytes, uint8 `[num_pages, page_bytes]`."""
        return torch.zeros(num_pages, self.page_bytes, dtype=torch.uint8, device=device)

    # ------------------------------------------------------------ the layouts in use
    @classmethod
    def window_fp8(cls, dim: int, page_size: int) -> KVLayout:
        """Window rows: e4m3, one ue8m0 per 32 channels, interleaved (528 bytes at dim 512)."""
        return cls(dim, "e4m3", 32, "ue8m0", page_size, interleaved=True)

    @classmethod
    def compressed_fp4(cls, dim: int, page_size: int) -> KVLayout:
        """Compressed rows: e2m1, one e4m3 per 16 channels, interleaved (288 bytes at 512)."""
        return cls(dim, "e2m1", 16, "e4m3", page_size, interleaved=True)

    @classmethod
    def compressed_fp8(cls, dim: int, page_size: int) -> KVLayout:
        """Compressed rows in the window's format. Rounds twice: the e2m1 value, then to e4m3."""
        return cls(dim, "e4m3", 32, "ue8m0", page_size, interleaved=True, first="compressed")

    @classmethod
    def index_fp4(cls, dim: int, page_size: int) -> KVLayout:
        """Index keys: e2m1, one ue8m0 per 32 channels, block-split (68 bytes at dim 128)."""
        return cls(dim, "e2m1", 32, "ue8m0", page_size, interleaved=False)

    @classmethod
    def index_fp8(cls, dim: int, page_size: int, scale: str = "fp32_pow2") -> KVLayout:
        """Index keys: the e2m1 value as e4m3 with one fp32 scale a row (132 bytes at dim 128).

        With the power-of-two scale nothing is lost while the row's e2m1 scales span at most
        2^14; `scale="fp32"` keeps amax/448 unrounded.
        """
        return cls(dim, "e4m3", dim, scale, page_size, interleaved=False, first="index")

    @classmethod
    def index_mxfp8(cls, dim: int, page_size: int) -> KVLayout:
        """Index keys: the e2m1 value as e4m3 with one ue8m0 per 32 channels (132 bytes at 128)."""
        return cls(dim, "e4m3", 32, "ue8m0", page_size, interleaved=False, first="index")

    @classmethod
    def rows_bf16(cls, dim: int, page_size: int = 1) -> KVLayout:
        """Plain bf16 rows; with page_size 1 the cache is a matrix and a slot is its row."""
        return cls(dim, "bf16", 0, "none", page_size, interleaved=True)


def check_cache(op: str, cache: Tensor, layout: KVLayout, name: str = "cache") -> None:
    """The cache fits the layout: uint8 `[num_pages, page_bytes]`, contiguous within a page."""
    if cache.dtype != torch.uint8:
        raise TypeError(f"{op}: {name} must be uint8, got {cache.dtype}")
    if cache.dim() != 2 or cache.shape[1] != layout.page_bytes or cache.stride(1) != 1:
        raise ValueError(
            f"{op}: {name} must be [num_pages, {layout.page_bytes}] with contiguous pages, "
            f"got {list(cache.shape)} with strides {list(cache.stride())}"
        )
