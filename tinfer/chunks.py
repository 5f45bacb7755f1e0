"""Row chunks that bound the size of a [rows, columns] fp32 buffer, such as the index logits."""

from __future__ import annotations

from collections.abc import Iterator

LOGITS_BYTES = 512 << 20  # 128 rows at a million columns


def row_chunks(rows: int, columns: int, budget: int = LOGITS_BYTES) -> Iterator[slice]:
    """Slices that cover `rows` so that one chunk of fp32 [rows, columns] fits `budget` bytes.

    A chunk never gets smaller than one row. Row-wise results do not depend on the split.
    """
    step = max(1, budget // (4 * max(columns, 1)))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
