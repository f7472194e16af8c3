"""What rpcpipe tells of its work, each line with rank and stage; else quiet."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rpcpipe import log

SCRIPT = """
import logging, sys
import torch
from torch import nn
import rpcpipe

def train(world):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = rpcpipe.Pipe(module, world, sample=torch.ones(2, 4))
    if len(sys.argv) > 2:
        pipe.save(sys.argv[2])
        pipe.load(sys.argv[2])

if __name__ == "__main__":
    if len(sys.argv) > 1:
        logging.basicConfig(level=sys.argv[1], format="%(name)s: %(message)s")
    rpcpipe.run(train)
"""


def output(tmp_path: Path, *command: str, stages: int = 2) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("rpcpipe.run(train)", f"rpcpipe.run(train, stages={stages})"))
    line = [word.replace("SCRIPT", str(script)) for word in command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return [line for line in (done.stdout + done.stderr).splitlines() if "rpcpipe: " in line]


def test_the_level_of_the_driver_holds_in_the_stages(tmp_path: Path) -> None:
    lines = output(tmp_path, sys.executable, "SCRIPT", "INFO", str(tmp_path / "saved"))
    first = next(line for line in lines if "rank 0, driver: " in line)
    assert f"pipe 0: driver {socket.gethostname()}:0, stage 0 " in first
    assert "rpcpipe: rank 0, driver: timed 2 layers, 7 times each" in lines
    assert any("rpcpipe: rank 0, driver: stage 1 gets 1 layers, " in line for line in lines)
    for j in range(2):
        told = f"[stage {j}] INFO rpcpipe: rank {j + 1}, stage {j}: built 1 layers on cpu in "
        assert any(line.startswith(told) for line in lines), lines
        told = (
            f"[stage {j}] INFO rpcpipe: rank {j + 1}, stage {j}: wrote its part of a checkpoint: "
        )
        assert any(line.startswith(told) for line in lines), lines
    for done in ("saved", "loaded"):
        assert any(f"rpcpipe: rank 0, driver: {done} {tmp_path}" in line for line in lines), lines


def test_under_a_launcher_a_driver_that_shares_a_process_is_told_from_its_stage(
    tmp_path: Path,
) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    lines = output(tmp_path, sys.executable, *torchrun, "SCRIPT", "INFO", stages=1)
    assert any("rpcpipe: rank 0, driver: stage 0 gets 2 layers" in line for line in lines), lines
    assert any("rpcpipe: rank 0, stage 0: built 2 layers" in line for line in lines), lines


def test_long_work_is_told_of_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "rpcpipe"):
        assert list(log.progress("abc", 3, "spelling")) == ["a", "b", "c"]
        assert "spelling" not in caplog.text
        monkeypatch.setattr(log, "PERIOD", 0.0)
        list(log.progress("abc", 3, "spelling"))
    assert "spelling: 1 of 3 done in 0 s" in caplog.text


def test_work_of_which_nothing_is_known_is_told_to_go_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "PERIOD", 0.01)
    threads = threading.active_count()
    with log.lasting("sleeping"):  # nobody asked to be told
        assert threading.active_count() == threads
    with caplog.at_level(logging.INFO, "rpcpipe"):
        deadline = time.monotonic() + 10
        with log.lasting("digging"):
            while "digging: 0 s so far" not in caplog.text:
                assert time.monotonic() < deadline
        assert threading.active_count() == threads
    assert "sleeping" not in caplog.text
