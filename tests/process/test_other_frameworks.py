"""Programs of other frameworks, unchanged, in a function that a strategy launches."""

import json
from typing import Any

import pytest

from tests.helpers.load import slowdown
from tests.helpers.needs import need_installed
from tests.helpers.scripts import WITHOUT_COVERAGE, ScriptRunner

SOAK, FRAMEWORKS = pytest.mark.soak, pytest.mark.frameworks
START_METHODS = ["fork", *(pytest.param(name, marks=SOAK) for name in ("spawn", "forkserver", "popen"))]

TRANSFORMERS = """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

class Failing(Trainer):
    def training_step(self, *args, **kwargs):
        if self.fails and self.args.process_index == 1 and self.state.global_step == 2:
            Path("failed_s").write_text(str(time.monotonic()))
            if self.fails == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("loss is nan")
        return super().training_step(*args, **kwargs)

def main(strategy, batch_size, fails=""):
    set_seed(1)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    sizes |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(BertConfig(vocab_size=32, **sizes))
    tokens = torch.randint(32, (32, 8))
    data = [{"input_ids": each, "labels": int(each[0] > 15)} for each in tokens]
    arguments = TrainingArguments(
        "out", num_train_epochs=1, per_device_train_batch_size=batch_size, report_to="none",
        learning_rate=0.01, optim="sgd", disable_tqdm=True, save_strategy="no", seed=1, use_cpu=True,
        average_tokens_across_devices=False,  # its way of that multiplies the loss of this model by the ranks
    )
    trainer = Failing(model, arguments, train_dataset=data)
    trainer.fails = fails
    trainer.train()
    return [trainer.state.global_step, trainer.args.world_size, model.classifier.weight.flatten().tolist()]
"""

ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import set_seed

def main(strategy, batch_size, fails=""):
    set_seed(1)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.arange(256.0).view(32, 8).sin(), batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):
        if fails and accelerator.process_index == 1 and number == 2:
            Path("failed_s").write_text(str(time.monotonic()))
            raise ValueError("loss is nan")
        optimizer.zero_grad()
        accelerator.backward((model(batch) - 1).square().mean())
        optimizer.step()
    weight = accelerator.unwrap_model(model).weight
    return [len(loader), accelerator.num_processes, weight.flatten().tolist()]
"""

RUN = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from rankwise import DDPStrategy
from rankwise.errors import WorkerError

if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:  # and not in a rank that runs the script again
        if os.fork() == 0:  # "popen" refuses to launch after another strategy; and Accelerate keeps a state
            alone = DDPStrategy(start_method="fork", devices=1, accelerator="cpu").launch(main, 8)
            print(json.dumps(alone), flush=True)
            os._exit(0)
        os.wait()
    before = dict(os.environ)
    strategy = DDPStrategy(start_method=sys.argv[1], devices=2, accelerator="cpu")
    both = strategy.launch(main, 4)
    again = strategy.launch(main, 4)
    changed = sorted(set(os.environ.items()) ^ set(before.items()))
    has_group = torch.distributed.is_initialized()
    if strategy.is_global_zero:
        print(json.dumps([both, again, changed, has_group]), flush=True)
    try:
        strategy.launch(main, 4, sys.argv[2])
    except WorkerError as error:
        took_s = time.monotonic() - float(Path("failed_s").read_text())
        print(json.dumps([took_s, type(error).__name__, str(error)]), flush=True)
"""


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize(
    ("package", "program", "fails"),
    [
        pytest.param("accelerate", ACCELERATE, "raise", marks=pytest.mark.quick),
        pytest.param("transformers", TRANSFORMERS, "raise", marks=FRAMEWORKS),
        pytest.param("transformers", TRANSFORMERS, "kill", marks=[FRAMEWORKS, SOAK]),
    ],
)
def test_a_program(
    run_script: ScriptRunner, start_method: str, package: str, program: str, fails: str
) -> None:
    """Two ranks train as one, twice; a rank that fails is reported within two seconds, and none is left."""
    need_installed(package)
    result = run_script(program + RUN, start_method, fails, env=WITHOUT_COVERAGE, timeout=180)
    lines = result.check_returncode().stdout.splitlines()
    alone, trained, failure = (json.loads(line) for line in lines if line.startswith("["))
    both, again, changed, has_group = trained
    check_trained(alone, 1, both)
    check_trained(both, 2, both)
    assert again == both
    is_in_main = start_method == "popen"  # so is rank 0, in which Accelerate sets a variable of its own
    assert changed == [["MASTER_PORT", "29500"]] * is_in_main
    assert not has_group
    took_s, name, message = failure
    assert took_s < 2 * slowdown()
    assert name == ("WorkerKilledError" if fails == "kill" else "WorkerRaisedError")
    assert "global_rank=1" in message
    assert ("SIGKILL" if fails == "kill" else "raised ValueError: loss is nan") in message


def check_trained(found: Any, world_size: int, expected: Any) -> None:
    """Compare steps and weights with those of another number of ranks and the same global batch."""
    steps, ranks, weights = found
    assert (steps, ranks) == (4, world_size)
    assert weights == pytest.approx(expected[2], abs=1e-6)
