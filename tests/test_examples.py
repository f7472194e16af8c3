"""The examples: each runs by its one command, in a reduced form, and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

REDUCED = {
    "train_gpt.py": "--steps 60 --batch 16 --context 32 --chunks 2",
    "train_resnet.py": "--epochs 2 --width 8 --blocks 1 --chunks 2",
    "train_unet.py": "--stages 2 --steps 50 --batch 4 --chunks 2 --side 32 --width 8 --depth 2",
    "dist_autograd_style.py": "--steps 60 --depth 2 --width 64 --chunks 2",
}

ELSEWHERE = {"train_ddp.py", "resume.py"}  # run by test_ddp.py and test_resume.py


def test_every_example_is_run() -> None:
    found = {path.name for path in EXAMPLES.glob("*.py")}
    assert found - ELSEWHERE == set(REDUCED)
    assert all(len((EXAMPLES / name).read_text().splitlines()) < 120 for name in found)


@pytest.mark.parametrize("name", REDUCED)
def test_example_learns_by_one_command(name: str, tmp_path: Path) -> None:
    source = (EXAMPLES / name).read_text()
    assert f"\n    python examples/{name}" in source.split('"""')[1], "its first lines say how"
    # An example exits with an error if the loss has not gone down.
    command = [sys.executable, str(EXAMPLES / name), *REDUCED[name].split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"loss|squared error", done.stdout)
    assert "rpcpipe: rank" not in done.stderr, "quiet by default"
    assert list(tmp_path.iterdir()) == []


def test_notebook_runs_from_top_to_bottom() -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without its outputs"
    client(notebook, timeout=100, kernel_name="python3").execute()
    texts = [
        output.get("text", "") + output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    first, last = map(float, re.search(r"loss (\S+) -> (\S+)", "".join(texts)).groups())
    assert last < 0.5 * first
    assert "stage 1 | " in "".join(texts)
    assert float(re.search(r"tensor\((\S+)\)", texts[-1]).group(1)) > 0.8
