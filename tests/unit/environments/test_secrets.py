"""Messages show the launcher's own variables, and no others."""

import pickle

import pytest

from rankwise.environments import TorchElasticEnvironment, detect_environment
from rankwise.errors import EnvironmentVariableError, RankwiseError, WorldSizeMismatchError
from rankwise.strategies import DDPStrategy
from tests.unit.environments.variables import torchrun

SECRET = "s3cr3t-t0k3n"  # not a password
SECRETS = dict.fromkeys(("API_TOKEN", "AWS_SECRET_ACCESS_KEY", "RANKWISE_TOKEN", "MASTER_PASSWORD"), SECRET)


def is_told(error: RankwiseError) -> bool:
    """Return whether the secret is in the error or its pickle."""
    return any(SECRET in text for text in (str(error), repr(error), repr(vars(error)))) or (
        SECRET.encode() in pickle.dumps(error)
    )


@pytest.mark.parametrize(("variable", "value"), [("RANK", "many"), ("RANK", "7"), ("MASTER_ADDR", "")])
def test_wrong_variables(variable: str, value: str) -> None:
    """An error about variables shows those that are read."""
    environ = {**torchrun(0), **SECRETS, variable: value}
    with pytest.raises(EnvironmentVariableError) as caught:
        detect_environment(environ)
    assert variable in str(caught.value)
    assert not is_told(caught.value)


def test_wrong_world() -> None:
    """So do the error about another world size, and the environment's repr."""
    environment = TorchElasticEnvironment({**torchrun(0), **SECRETS})
    assert SECRET not in repr(environment)
    with pytest.raises(WorldSizeMismatchError) as caught:
        DDPStrategy(accelerator="cpu", devices=3).bind(environment=environment)
    assert not is_told(caught.value)
