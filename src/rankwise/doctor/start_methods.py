"""Which start methods work here: each is tried with two processes that meet."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rankwise.doctor.report import Finding, Section, table
from rankwise.errors import RankwiseError
from rankwise.strategies import DDPStrategy, Strategy

_SCRIPT = "from rankwise.doctor.start_methods import try_here; try_here('popen', {timeout_s!r})"
_NAMES = {"popen": "ddp", "spawn": "ddp_spawn", "fork": "ddp_fork", "forkserver": "ddp_forkserver"}


def examine_start_methods(timeout_s: float) -> Section:
    """Start two processes in each way, and let them meet."""
    trials: dict[str, Callable[[], None]] = {
        "popen": lambda: _try_script(timeout_s),
        "spawn": lambda: try_here("spawn", timeout_s),
        "fork": lambda: try_here("fork", timeout_s),
        "forkserver": lambda: try_here("forkserver", timeout_s),
    }
    results = {method: _tried(trial) for method, trial in trials.items()}
    rows = [(_NAMES[method], method, _in_words(result)) for method, result in results.items()]
    lines = table(("strategy", "start_method", "two processes"), rows)
    findings = [
        Finding(
            f'strategy="{_NAMES[method]}" does not work here: {result["problem"]}',
            result["fix"] or _another(results),
        )
        for method, result in results.items()
        if not result["works"]
    ]
    return Section("start_methods", "Start methods", results, lines, findings)


def try_here(start_method: str, timeout_s: float) -> None:
    """Let two processes meet once."""
    strategy = DDPStrategy(
        accelerator="cpu",
        devices=2,
        num_nodes=1,
        cluster_environment="local",
        start_method=start_method,
        init_timeout=timeout_s,
        timeout=timeout_s,
    )
    strategy.launch(_meet)


def _meet(strategy: Strategy) -> int:
    strategy.barrier()
    return strategy.global_rank


def _try_script(timeout_s: float) -> None:
    # A program of its own, since its processes stay until it ends. It has timeouts itself: this one is spare.
    command = [sys.executable, "-c", _SCRIPT.format(timeout_s=timeout_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s + 60)
    if done.returncode != 0:
        raise RuntimeError(_last_line(done.stderr) or f"exit code {done.returncode}")


def _tried(trial: Callable[[], None]) -> dict[str, Any]:
    result: dict[str, Any] = {"works": True, "seconds": None, "problem": "", "fix": ""}
    started = time.monotonic()
    with _caught(result):
        trial()
    result["seconds"] = round(time.monotonic() - started, 3)
    return result


@contextmanager
def _caught(result: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except RankwiseError as error:
        result.update(works=False, problem=error.summary(), fix=error.fix())
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        result.update(works=False, problem=f"{error}.")


def _in_words(result: Mapping[str, Any]) -> str:
    return f"met after {result['seconds']:.1f} s" if result["works"] else "do not meet: see below"


def _another(results: Mapping[str, Mapping[str, Any]]) -> str:
    working = [_NAMES[method] for method, result in results.items() if result["works"]]
    if not working:
        return "no start method works: see whether processes may be started here at all (ulimit -u, seccomp)."
    return f'use strategy="{working[0]}" instead.'


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
