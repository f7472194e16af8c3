"""What a type checker makes of a user's script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_a_users_script_has_useful_types_under_mypy_strict() -> None:
    """`--strict` also refuses a `type: ignore` that nothing needs: wrong arguments are noticed."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "tests/typed_script.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
