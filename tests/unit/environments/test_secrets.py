"""Messages show the launcher's own variables, and no others."""

import pickle

import pytest

from rankwise.environments import TorchElasticEnvironment, detect_environment
from rankwise.errors import EnvironmentVariableError, RankwiseError, WorldSizeMismatchError
from rankwise.strategies import DDPStrategy

SECRET = "s3cr3t-t0k3n"  # not a password
SECRETS = dict.fromkeys(("API_TOKEN", "AWS_SECRET_ACCESS_KEY", "RANKWISE_TOKEN", "MASTER_PASSWORD"), SECRET)
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def is_told(error: RankwiseError) -> bool:
    """Return whether the secret is in the error or its pickle."""
    return any(SECRET in text for text in (str(error), repr(error), repr(vars(error)))) or (
        SECRET.encode() in pickle.dumps(error)
    )


@pytest.mark.parametrize(("variable", "value"), [("RANK", "many"), ("RANK", "7"), ("MASTER_ADDR", "")])
def test_wrong_variables(variable: str, value: str) -> None:
    """An error about variables shows those that are read."""
    environ = {**TORCHRUN, **SECRETS, variable: value}
    with pytest.raises(EnvironmentVariableError) as caught:
        detect_environment(environ)
    assert variable in str(caught.value)
    assert not is_told(caught.value)


def test_wrong_world() -> None:
    """So do the error about another world size, and the environment's repr."""
    environment = TorchElasticEnvironment({**TORCHRUN, **SECRETS})
    assert SECRET not in repr(environment)
    with pytest.raises(WorldSizeMismatchError) as caught:
        DDPStrategy(accelerator="cpu", devices=3).bind(environment=environment)
    assert not is_told(caught.value)
