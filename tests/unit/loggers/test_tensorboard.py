"""Event files, read by TensorBoard's own reader."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rankwise.loggers import TensorBoardLogger
from tests.helpers.logger_files import event_files, events, scalars
from tests.helpers.needs import need_installed
from tests.unit.trainer.helpers import Line, fitted

need_installed("tensorboard")


def test_metrics(tmp_path: Path) -> None:
    """Metrics have their step and prefix, and are in the file at once; tensors and mappings work, too."""
    logger = TensorBoardLogger(tmp_path, "runs", version="a", prefix="my", sub_dir="sub")
    logger.log_metrics({"loss": 0.5, "x": torch.tensor(2.0)}, step=3)
    logger.log_metrics({"loss": 0.25, "both": {"train": 1.0}}, step=4)
    folder = tmp_path / "runs" / "a" / "sub"
    assert (logger.name, logger.version, logger.save_dir) == ("runs", "a", str(tmp_path))
    assert (logger.log_dir, logger.root_dir) == (str(folder), str(tmp_path / "runs"))
    assert scalars(folder) == {"my-loss": [(3, 0.5), (4, 0.25)], "my-x": [(3, 2.0)]}
    assert scalars(folder / "my-both_train") == {"my-both": [(4, 1.0)]}
    logger.finalize("success")


def test_hyper_parameters(tmp_path: Path) -> None:
    """They are flat, are found by TensorBoard's plugin, and come with a metric, if any, at step 0."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    logger = TensorBoardLogger(tmp_path, name=None, version=0, prefix="my")
    logger.log_hyperparams({"opt": {"lr": 0.5, "name": None}})
    assert scalars(logger.log_dir) == {"my-hp_metric": [(0, -1.0)]}
    content = events(logger.log_dir).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hyper_parameters = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hyper_parameters["opt/lr"].number_value == 0.5
    assert hyper_parameters["opt/name"].string_value == "None"
    logger.finalize("success")
    for name, metrics in (("given", {"best": torch.tensor(3.0)}), ("none", None)):
        logger = TensorBoardLogger(tmp_path, name, default_hp_metric=metrics is not None)
        logger.log_hyperparams({"lr": 0.1}, metrics)
        assert scalars(logger.log_dir) == ({} if metrics is None else {"best": [(0, 3.0)]})
        logger.finalize("success")


def test_images(tmp_path: Path) -> None:
    """Tensors of images become images."""
    logger = TensorBoardLogger(tmp_path)
    logger.log_image("digits", [torch.rand(3, 4, 5), torch.rand(4, 5)], step=2)
    logger.save()
    images = events(logger.log_dir).Images("digits/0")
    assert [(image.step, image.width, image.height) for image in images] == [(2, 5, 4)]
    assert len(events(logger.log_dir).Images("digits/1")) == 1
    logger.finalize("success")


def test_later_stages(tmp_path: Path) -> None:
    """What is logged after the end goes into a second file of the same run; so does a copy's."""
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("success")
    logger.log_metrics({"loss": 2.0}, 2)
    copied = pickle.loads(pickle.dumps(logger))
    copied.log_metrics({"loss": 3.0}, 3)
    logger.finalize("failed")
    copied.finalize("success")
    assert len(event_files(logger.log_dir)) == 3
    assert sorted(scalars(logger.log_dir)["loss"]) == [(1, 1.0), (2, 2.0), (3, 3.0)]


class WithGraph(Line):
    """Has a forward method and example arguments."""

    example_input_array = torch.zeros(1, 2)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def test_graph(tmp_path: Path) -> None:
    """It is written when a fit begins; a module without example arguments gets a warning, if asked."""
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    fitted(tmp_path, WithGraph(), logger=logger)
    assert events(logger.log_dir).Tags()["graph"]
    TensorBoardLogger(tmp_path).log_graph(Line())
    with pytest.warns(UserWarning, match="Line has no example_input_array"):
        TensorBoardLogger(tmp_path, log_graph=True).log_graph(Line())
