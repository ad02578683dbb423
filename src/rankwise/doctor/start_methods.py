"""The report's section on start methods: each one starts and connects two processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rankwise.doctor.report import Finding, Section, table
from rankwise.errors import RankwiseError
from rankwise.strategies import DDPStrategy, Strategy

_SCRIPT = f"from {__name__} import try_start_method; try_start_method('popen', {{timeout_s!r}})"
_NAMES = {"popen": "ddp", "spawn": "ddp_spawn", "fork": "ddp_fork", "forkserver": "ddp_forkserver"}


def examine_start_methods(timeout_s: float) -> Section:
    """Try each start method."""
    trials: dict[str, Callable[[], None]] = {
        "popen": lambda: _try_script(timeout_s),
        "spawn": lambda: try_start_method("spawn", timeout_s),
        "fork": lambda: try_start_method("fork", timeout_s),
        "forkserver": lambda: try_start_method("forkserver", timeout_s),
    }
    results = {method: _result_of(trial) for method, trial in trials.items()}
    rows = [
        (_NAMES[method], method, f"{result['seconds']:.1f} s" if result["works"] else "failed: see below")
        for method, result in results.items()
    ]
    lines = table(("strategy", "start_method", "two processes"), rows)
    findings = [
        Finding(
            f'strategy="{_NAMES[method]}" does not work here: {result["problem"]}',
            result["fix"] or _alternative(results),
        )
        for method, result in results.items()
        if not result["works"]
    ]
    return Section("start_methods", "Start methods", results, lines, findings)


def try_start_method(start_method: str, timeout_s: float) -> None:
    """Start two processes and connect them once."""
    strategy = DDPStrategy(
        accelerator="cpu",
        devices=2,
        num_nodes=1,
        cluster_environment="local",
        start_method=start_method,
        init_timeout=timeout_s,
        timeout=timeout_s,
    )
    strategy.launch(_barrier)


def _barrier(strategy: Strategy) -> None:
    strategy.barrier()


def _try_script(timeout_s: float) -> None:
    # In another program, since the workers of "popen" run until the program ends.
    command = [sys.executable, "-c", _SCRIPT.format(timeout_s=timeout_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s + 60)
    if done.returncode != 0:
        raise RuntimeError(_last_line(done.stderr) or f"exit code {done.returncode}")


def _result_of(trial: Callable[[], None]) -> dict[str, Any]:
    result: dict[str, Any] = {"works": True, "seconds": None, "problem": "", "fix": ""}
    started = time.monotonic()
    try:
        trial()
    except RankwiseError as error:
        result.update(works=False, problem=error.summary(), fix=error.fix())
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        result.update(works=False, problem=f"{error}.")
    result["seconds"] = round(time.monotonic() - started, 3)
    return result


def _alternative(results: Mapping[str, Mapping[str, Any]]) -> str:
    working = [_NAMES[method] for method, result in results.items() if result["works"]]
    if not working:
        return "no start method works: check whether processes may be started here (ulimit -u, seccomp)."
    return f'use strategy="{working[0]}" instead.'


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
