"""Triton kernels, one module per op family, loaded only when an op asks for one."""
