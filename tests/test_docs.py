"""The documentation: its code runs, its messages and links exist, its reference is current."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


def blocks(page: Path, info: str) -> list[str]:
    found = re.findall(r"^```(.*?)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [code for kind, code in found if kind == info]


def is_script(page: Path) -> bool:
    return bool(blocks(page, "python"))


@pytest.mark.parametrize("page", list(filter(is_script, PAGES)), ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_as_one_script(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n\n".join(blocks(page, "python")))
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_that_should_have_scripts_have() -> None:
    assert {"quickstart", "guide", "migrating", "training"} <= {
        page.stem for page in PAGES if is_script(page)
    }


@pytest.mark.parametrize("page", [*PAGES, *FRONT], ids=lambda page: page.stem)
def test_other_blocks_are_python_and_links_lead_somewhere(page: Path) -> None:
    for code in [*blocks(page, "python peer"), *blocks(page, "python fragment")]:
        ast.parse(code)
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for test in re.findall(r"`(test_\w+\.py)", text):
        assert (ROOT / "tests" / test).exists(), test
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text):
        assert anchor in anchors((page.parent / target if target else page).read_text()), anchor


def anchors(text: str) -> set[str]:
    """Of its headings, as code hosts make them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


BUILT = """
from torch import nn

def build_model():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))

loader = [(torch.randn(8, 4), torch.randint(4, (8,))) for _ in range(3)]
"""


def test_the_script_of_the_readme_runs(tmp_path: Path) -> None:
    (script,) = blocks(ROOT / "README.md", "python")
    head, train = script.split("\n\n\n", 1)
    (tmp_path / "train.py").write_text(head + BUILT + train)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), "and is quiet"


def test_every_cell_of_the_comparison_says_how_it_was_verified() -> None:
    """Ours by a test that exists, each peer's by checks of verify_peers.py."""
    text = (DOCS / "comparison.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in table[1:]]
    checks = (DOCS / "verify_peers.py").read_text()
    assert len(rows) >= 10
    for aspect, ours, *theirs in rows:
        found = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", ours)
        assert found, aspect
        for file, test in found:
            assert f"def {test}" in (ROOT / "tests" / file).read_text(), (file, test)
        for cell in theirs:
            named = re.findall(r"\[([\w ]+)\]", cell)
            assert named, (aspect, cell)
            assert all(f'"{name}": ' in checks for name in named), cell


def source() -> str:
    """All of the library's code with its strings joined, in one line."""
    files = sorted((ROOT / "rpcpipe").rglob("*.py"))
    text = "\n".join(file.read_text() for file in files)
    return re.sub(r'["\']\s*\n\s*f?["\']', "", text)


def test_every_message_that_is_explained_is_in_the_source() -> None:
    messages = re.findall(r"^> (.+)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(messages) >= 15
    code = source()
    missing = [message for message in messages if message not in code]
    assert not missing


def test_the_reference_is_that_of_the_docstrings() -> None:
    spec = importlib.util.spec_from_file_location("make_api", DOCS / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "api.md").read_text() == module.page(), "run python docs/make_api.py"


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    assert all(f"({page.name})" in index for page in PAGES if page.name != "README.md")
