"""The tree is the architecture: imports point one way, and one name finds every part of an op."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tinfer import registry

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tinfer"
# Each layer may import itself and the layers after it.
LAYERS = [
    ("generate",),
    ("runtime", "trace", "arguments", "result"),
    ("engine", "logit_control"),
    ("request",),
    ("chat", "completion", "tokenizer"),
    ("model", "cache"),
    ("ops",),
    ("registry",),
    ("compat", "chunks"),
    ("checkpoint",),
    ("kv_layout",),
    ("config", "config_checks", "config_keys"),
    ("formats",),
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def _imports(path: Path) -> set[str]:
    """Second parts of the tinfer modules that a file imports outside TYPE_CHECKING blocks."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "tinfer":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinfer."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.startswith("tinfer.")]
            found |= {n.split(".")[1] for n in names}
    return found


def _layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(p for p in PACKAGE.rglob("*.py") if _layer(p) in RANK)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    mine = RANK[_layer(path)]
    upward = {m for m in _imports(path) if m in RANK and RANK[m] < mine}
    assert not upward, f"{path.name} must not import {upward}"
    assert "kernels" not in _imports(path), "kernels load through the registry alone"


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").glob("*.py")), ids=lambda p: p.name)
def test_kernels_import_only_contracts(path: Path) -> None:
    allowed = {"kernels", "compat", "formats", "kv_layout", "registry"}
    assert _imports(path) <= allowed


def _imported_first(path: Path) -> set[str]:
    """Modules that a file imports as soon as it is imported itself."""
    tree = ast.parse(path.read_text())
    return {n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom)}


def test_vendor_parts_of_triton_load_only_where_they_are_used() -> None:
    """A fork without Gluon or without CUDA's library can still load every portable kernel."""
    files = sorted((PACKAGE / "kernels").glob("*.py"))
    vendor = ("triton.experimental", "triton.language.extra")
    special = {
        f"tinfer.kernels.{p.stem}"
        for p in files
        if any(m.startswith(vendor) for m in _imported_first(p))
    }
    assert special
    for path in files:
        if f"tinfer.kernels.{path.stem}" not in special:
            assert not _imported_first(path) & special, path.name
    families = {op.family for op in registry.OPS.values() if op.has_kernel}
    assert not {f"tinfer.kernels.{f}" for f in families} & special


def test_everything_belongs_to_a_layer() -> None:
    known = {*RANK, "kernels", "testing", "bringup", "assets", "__init__"}
    found = {_layer(p) for p in PACKAGE.rglob("*.py")}
    assert found <= known


@pytest.mark.parametrize("name", sorted(registry.OPS))
def test_one_name_finds_every_part(name: str) -> None:
    family = registry.get(name).family
    parts = [PACKAGE / "compat" / f"{family}.py", ROOT / "tests" / "kernels" / f"test_{family}.py"]
    parts.append(PACKAGE / "testing" / "cases" / f"{family}.py")
    if registry.get(name).has_kernel:
        parts.append(PACKAGE / "kernels" / f"{family}.py")
    missing = [str(p.relative_to(ROOT)) for p in parts if not p.exists()]
    assert not missing


def test_readme_commands_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    first_screen = "\n".join(readme.splitlines()[:40])
    for target in ("demo", "test"):
        assert f"make {target}" in first_screen
        assert f"\n{target}:" in makefile
    assert "make test" in (ROOT / ".ci" / "run").read_text()
