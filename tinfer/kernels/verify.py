"""Verification of drafts: by equality, and by rejection over integer masses (`_verify_rejection`).

Source: the references' contracts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.masses import ACCEPT, SAMPLE
from tinfer.compat.verify import check_get_accept_result, check_verify_drafts
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason, stride_reason
from tinfer.kernels._verify_rejection import _decide_kernel, _residual_kernel
from tinfer.kernels.sampling import MAX_COLUMNS, row_masses


# ---------------------------------------------------------------- by equality
@triton.jit
def _truth(target_tokens, golden_tokens, golden, row, mask):
    """The tokens that drafts are held against, -1 where masked."""
    token = tl.load(target_tokens + row, mask=mask, other=-1)
    if golden_tokens is not None:
        other = tl.load(golden_tokens + row, mask=mask, other=-1)
        token = tl.where(golden > 0, other, token)
    return token


@triton.jit
def _accept_kernel(
    target_tokens,  # int64 [R]
    draft_tokens,  # int64 [R]
    cu_rows,  # int32 [B+1]
    golden_tokens,  # int64 [R], or None
    golden_mask,  # uint8 [B], or None
    accept_len,  # int32 [B]
    accepted,  # uint8 [R]
    next_token,  # int64 [B]
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    begin, end = tl.load(cu_rows + b), tl.load(cu_rows + b + 1)
    golden = 0
    if golden_mask is not None:
        golden = tl.load(golden_mask + b).to(tl.int32)
    failed_at = end - 1 + tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end - 1, BLOCK):
        row = start + tl.arange(0, BLOCK)
        live = row < end - 1
        draft = tl.load(draft_tokens + row, mask=live, other=0)
        same = _truth(target_tokens, golden_tokens, golden, row, live) == draft
        failed_at = tl.minimum(failed_at, tl.where(live & (same == 0), row, end - 1))
    stop = tl.min(failed_at)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(accepted + row, (row < stop).to(tl.uint8), mask=row < end)
    has_rows = end > begin
    tl.store(accept_len + b, tl.where(has_rows, stop - begin, 0))
    tl.store(next_token + b, _truth(target_tokens, golden_tokens, golden, stop, has_rows))


def supports_get_accept_result(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_rows: Tensor,
    golden_tokens: Tensor | None,
    golden_mask: Tensor | None,
) -> str | None:
    """At most 65535 requests; contiguous tensors on one device."""
    tensors = {
        "target_tokens": target_tokens,
        "draft_tokens": draft_tokens,
        "cu_rows": cu_rows,
        "golden_tokens": golden_tokens,
        "golden_mask": golden_mask,
    }
    if cu_rows.shape[0] - 1 > MAX_PROGRAMS:
        return f"more than {MAX_PROGRAMS} requests"
    return device_reason(**tensors) or contiguous_reason(**tensors)


def get_accept_result(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_rows: Tensor,
    golden_tokens: Tensor | None,
    golden_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_get_accept_result(target_tokens, draft_tokens, cu_rows, golden_tokens, golden_mask)
    rows, requests = target_tokens.shape[0], cu_rows.shape[0] - 1
    device = cu_rows.device
    accept_len = torch.empty(requests, dtype=torch.int32, device=device)
    accepted = torch.zeros(rows, dtype=torch.bool, device=device)
    next_token = torch.empty(requests, dtype=torch.int64, device=device)
    if requests:
        _accept_kernel[(requests,)](
            target_tokens, draft_tokens, cu_rows, golden_tokens,
            None if golden_mask is None else golden_mask.view(torch.uint8),
            accept_len, accepted.view(torch.uint8), next_token, BLOCK=32, num_warps=1,
        )  # fmt: skip
    return accept_len, accepted, next_token


# ---------------------------------------------------------------- by rejection
def supports_verify_drafts(
    logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> str | None:
    """Up to 2^20 columns, contiguous; tensors on one device."""
    flat = {
        "draft_tokens": draft_tokens,
        "cu_rows": cu_rows,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seeds": seeds,
        "positions": positions,
    }
    if logits.shape[1] > MAX_COLUMNS:
        return f"more than {MAX_COLUMNS} columns"
    rows = {"logits": logits, "draft_logits": draft_logits}
    return device_reason(**rows, **flat) or stride_reason(**rows) or contiguous_reason(**flat)


def verify_drafts(
    logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    filters = (temperature, top_k, top_p, min_p)
    check_verify_drafts(logits, draft_logits, draft_tokens, cu_rows, *filters, seeds, positions)
    requests, device = cu_rows.shape[0] - 1, logits.device
    accept_len = torch.empty(requests, dtype=torch.int32, device=device)
    next_token = torch.empty(requests, dtype=torch.int64, device=device)
    statuses = torch.empty(requests, dtype=torch.int32, device=device)
    if not requests:
        return accept_len, next_token, statuses
    if not logits.shape[0]:
        return accept_len.zero_(), next_token.fill_(-1), statuses.zero_()
    target = row_masses(logits, filters, None, None, True)
    draft = None if draft_logits is None else row_masses(draft_logits, filters, None, None, True)
    decisions = torch.empty(requests, 2, dtype=torch.int32, device=device)
    sums = torch.empty(requests, 3, target.slices, dtype=torch.int64, device=device)
    strides = (logits.stride(0), 0 if draft_logits is None else draft_logits.stride(0))
    sizes = {k: target.sizes[k] for k in ("SLICES", "PADDED")}
    masses = (*target.filters, *target.arrays, *((None,) * 4 if draft is None else draft.arrays))
    rows = (logits, draft_logits, draft_tokens)
    meta = {"num_warps": 1, "enable_fp_fusion": False}
    _decide_kernel[(requests,)](
        *rows, cu_rows, seeds, positions, *masses, accept_len, next_token, statuses, decisions,
        *strides, logits.shape[1], PURPOSE=ACCEPT, **sizes, **meta,
    )  # fmt: skip
    meta["num_warps"] = max(min(target.sizes["BLOCK"] // 512, 16), 1)
    for number, programs in enumerate(
        (requests * target.slices, requests * target.slices, requests)
    ):
        _residual_kernel[(programs,)](
            *rows, seeds, positions, *masses, decisions, sums, next_token, *strides,
            logits.shape[1], PASS=number, PURPOSE=SAMPLE, **target.sizes, **meta,
        )  # fmt: skip
    return accept_len, next_token, statuses
