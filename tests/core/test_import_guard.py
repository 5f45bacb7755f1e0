"""TileLang and its runtime never load beside tinfer, in this process or in a spawned one."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from tinfer.compat import import_guard

DECOY = "raise SystemExit('the decoy was executed')\n"


@pytest.fixture
def decoy(tmp_path: Path) -> Path:
    """A directory with importable packages of the barred names."""
    for name in import_guard.BARRED:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(DECOY)
    return tmp_path


def _run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("name", sorted(import_guard.BARRED))
@pytest.mark.parametrize("form", ["import {n}", "import {n}.language", "from {n} import x"])
def test_import_fails_by_name(name: str, form: str, decoy: Path) -> None:
    done = _run(f"import tinfer\n{form.format(n=name)}", decoy)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert name in done.stderr
    assert "<string>:3" in done.stderr  # who imported it
    assert "decoy was executed" not in done.stderr


def test_loaded_before_tinfer(decoy: Path) -> None:
    (decoy / "tilelang" / "__init__.py").write_text("")
    done = _run("import tilelang\nimport tinfer", decoy)
    assert done.returncode == 1
    assert "'tilelang' was loaded before tinfer" in done.stderr


def test_find_spec_reports_it_too(decoy: Path) -> None:
    """A library that only probes for the package must not find it."""
    code = "import tinfer, importlib.util\nimportlib.util.find_spec('tilelang')"
    assert "ImportError" in _run(code, decoy).stderr


def test_other_imports_are_untouched(decoy: Path) -> None:
    (decoy / "tilelang_extras.py").write_text("x = 1\n")
    done = _run("import tinfer, tilelang_extras\nprint(tilelang_extras.x)", decoy)
    assert done.stdout == "1\n"


def spawned(path: str) -> str:
    """Runs in a spawned worker: tinfer is imported there to unpickle nothing but this function."""
    sys.path.insert(0, path)
    import tinfer  # noqa: F401

    try:
        import tilelang  # noqa: F401
    except ImportError as error:
        return str(error)
    return "loaded"


def test_spawned_worker(decoy: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        message = pool.apply(spawned, (str(decoy),))
    assert "'tilelang' must not load" in message


def test_installing_twice_adds_one_finder() -> None:
    import_guard.install()
    finders = [f for f in sys.meta_path if isinstance(f, import_guard.ImportGuard)]
    assert len(finders) == 1
