"""A job that is killed and started again ends with the weights of one that was not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "resume.py"


@pytest.mark.timeout(300)
def test_weights_after_a_kill_at_a_random_moment_are_equal_bit_for_bit() -> None:
    result = subprocess.run(
        [sys.executable, EXAMPLE],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "killed after step" in result.stdout
    assert "goes on after step" in result.stdout
    assert result.stdout.endswith("the weights are equal, bit for bit\n")


def test_a_process_waits_for_what_is_being_saved_before_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE, "--directory", tmp_path, "--steps", "5"]
    subprocess.run(command, check=True, capture_output=True, timeout=110)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]
