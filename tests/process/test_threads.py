"""Launched from a thread that the end of the program takes with it: the workers go too."""

from __future__ import annotations

import pytest

from tests.helpers.scripts import ScriptRunner

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
    import sys, threading, time
    from pathlib import Path
    from rankwise.strategies import DDPStrategy

    def job(strategy):
        strategy.barrier()
        Path(f"busy{strategy.global_rank}").touch()
        time.sleep(60)

    def launch():
        DDPStrategy(start_method=sys.argv[1], accelerator="cpu", devices=2).launch(job)

    if __name__ == "__main__":
        threading.Thread(target=launch, daemon=True).start()
        while not all(Path(f"busy{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        print("both busy", flush=True)
        if sys.argv[2] == "raise":
            raise ValueError("in the main thread")
"""


@pytest.mark.parametrize(
    ("method", "how", "code"),
    [
        ("fork", "return", 0),
        pytest.param("fork", "raise", 1, marks=pytest.mark.soak),
        pytest.param("spawn", "return", 0, marks=pytest.mark.soak),
        pytest.param("forkserver", "return", 0, marks=pytest.mark.soak),
        pytest.param("popen", "return", 0, marks=pytest.mark.soak),
    ],
)
def test_a_daemon_thread_that_launched(method: str, how: str, code: int, run_script: ScriptRunner) -> None:
    """The main thread comes to the end of the script first: the program ends then, and leaves nobody."""
    running = run_script.start(SCRIPT, method, how)
    running.wait_for("both busy", timeout=50)
    result = running.finish(timeout=30, leftover_grace_s=20)  # of the time that unloading torch takes
    assert result.returncode == code, result
