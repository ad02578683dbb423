"""What a plain fit of "ddp" passes in rank 0, from `fit` to the first optimizer step: files and calls."""

import json

from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import with_tests

MOST_FILES, MOST_CALLS = 75, 2_600  # 2,480 calls on an idle machine; timers and messages that wait add some
UNUSED = {
    *("callbacks/learning_rate_finder.py", "compatibility/lightning_classes.py", "data/combined_loader.py"),
    *("data/iterable.py", "gradient_sync/tensor_hooks.py", "gradient_sync/weights.py", "hyperparameters.py"),
    *("process_group/distributed_optimizers.py", "process_group/lone_calls.py", "profilers.py"),
    *("registry.py", "trainer/loops/bucket_order.py", "trainer/loops/evaluation.py"),
    *("trainer/loops/closures.py", "trainer/loops/manual.py", "trainer/loops/nonfinite.py"),
    *("trainer/loops/schedulers.py", "trainer/metrics/metric_objects.py"),
}
SCRIPT = """
    import json, os, sys, threading
    from collections import Counter
    from torch.optim.optimizer import register_optimizer_step_post_hook
    import rankwise
    from tests.process.training_tasks import Regression, loader, quiet_trainer

    PACKAGE = os.path.dirname(rankwise.__file__) + os.sep
    passed = Counter()

    def count(frame, event, argument):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            passed[path.removeprefix(PACKAGE)] += 1

    def show(*_):
        threading.setprofile(None)
        sys.setprofile(None)
        if passed and trainer.is_global_zero:
            print(json.dumps(passed), flush=True)
            passed.clear()

    register_optimizer_step_post_hook(show)
    trainer = quiet_trainer("ddp", 2, max_epochs=1)
    threading.setprofile(count)
    sys.setprofile(count)
    trainer.fit(Regression(), loader(12, 2))
"""


def test_few_files_and_calls(run_script: ScriptRunner) -> None:
    """Whoever follows a fit to its first step reads few files, and none of a feature that it does not use."""
    result = run_script(SCRIPT, env=with_tests()).check_returncode()
    passed: dict[str, int] = json.loads(result.stdout)
    assert len(passed) <= MOST_FILES, sorted(passed)
    assert sum(passed.values()) <= MOST_CALLS, sorted(passed.items(), key=lambda item: -item[1])
    assert not passed.keys() & UNUSED
