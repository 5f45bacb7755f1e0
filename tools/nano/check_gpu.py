"""The fused attention, Sinkhorn tangent and fp32 products against plain torch, on a GPU."""

from __future__ import annotations

import torch

from tools.nano import attend, fused, mixes, quant


def compare(name: str, a: torch.Tensor, b: torch.Tensor, bound: float) -> bool:
    a, b = a.detach().float(), b.detach().float()
    error = float((a - b).norm() / b.norm())
    print(f"{name}: {error:.2e}{'' if error <= bound else '  TOO FAR'}")
    return error <= bound


def gradients(function, inputs, seed=1):  # type: ignore[no-untyped-def]
    """Outputs and gradients for random output gradients."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    outs = function(*inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.manual_seed(seed)
    grads = [torch.randn_like(o) for o in outs]
    return [*outs, *torch.autograd.grad(outs, inputs, grads)]


def check_kernels(device: torch.device) -> bool:
    good = True
    for kind, group in ((0, 32), (0, 1024), (1, 32), (2, 16)):
        for dtype in (torch.float32, torch.bfloat16):
            x = (torch.randn(999, group, device=device) * 3).to(dtype)
            good &= torch.equal(fused.fake_quant(x, kind), quant._ROUNDINGS[kind](x))
    print(f"roundings equal: {good}")
    stream = torch.randn(99, 4, 256, device=device).bfloat16()
    y, pre = torch.randn(99, 256, device=device).bfloat16(), torch.rand(99, 4, device=device)
    comb = torch.rand(99, 4, 4, device=device)
    weight = torch.rand(256, device=device).bfloat16()
    quant.use_fused(False)
    pairs = [
        ("enter", fused.Enter.apply, mixes.collapse, (stream, pre)),
        ("post", fused.Post.apply, mixes.post, (y, stream, pre, comb)),
    ]
    for name, left, right, inputs in pairs:
        for i, (a, b) in enumerate(
            zip(gradients(left, inputs), gradients(right, inputs), strict=True)
        ):
            good &= compare(f"{name} {i}", a, b, 5e-3)
    quant.use_fused(True)
    left = gradients(lambda x, w: mixes.rms_norm(x, w, 1e-20), (y, weight))
    quant.use_fused(False)
    right = gradients(lambda x, w: mixes.rms_norm(x, w, 1e-20), (y, weight))
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        good &= compare(f"rms_norm {i}", a, b, 1e-2)
    return good


def main() -> int:
    torch.manual_seed(0)
    device = torch.device("cuda")
    good = check_kernels(device)
    q = torch.randn(3, 8, 40, 128, device=device).bfloat16().requires_grad_()
    kv = torch.randn(3, 64, 128, device=device).bfloat16().requires_grad_()
    mask = torch.rand(1, 1, 40, 64, device=device) < 0.7
    mask[..., 0] = True
    sink = torch.randn(8, device=device).requires_grad_()
    grad = torch.randn(3, 8, 40, 128, device=device).bfloat16()
    found = []
    for function in (attend.attend, attend._plain):
        out, lse = function(q, kv, attend.allowed(mask), sink, 0.05)
        found.append((out, lse[:, :, :40], *torch.autograd.grad(out, (q, kv, sink), grad)))
    for name, a, b in zip(("out", "lse", "dq", "dkv", "dsink"), *found, strict=True):
        good &= compare(name, a, b, 1e-2)
    comb = torch.rand(77, 4, 4, device=device)
    grad = torch.randn(77, 4, 4, device=device)
    a, b = mixes._tangent_on_gpu(comb, grad), mixes._tangent(comb, grad)
    good &= compare("tangent", a, b, 1e-5)
    raw, scale = torch.randn(77, 24, device=device), torch.ones(3, device=device)
    base = torch.randn(24, device=device)
    for name, a, b in zip(
        ("pre", "post", "comb"),
        mixes._split_on_gpu(raw, scale, base, 1e-6, 20),
        mixes.hc_split(raw, scale, base, 1e-6, 20),
        strict=True,
    ):
        good &= compare(name, a, b, 1e-5)
    x = torch.randn(50, 256, device=device).bfloat16()
    w = torch.randn(24, 256, device=device).bfloat16()
    a, b = quant.linear_f32(x, w), x.double() @ w.double().t()
    good &= compare("linear_f32", a, b, 1e-5)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
