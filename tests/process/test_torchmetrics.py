"""Every class of torchmetrics gives on several ranks what it gives in one process."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.metric import CompositionalMetric

from rankwise import TrainingModule
from tests.helpers.metric_examples import PARTS, Example, digest, examples
from tests.process.training_tasks import quiet_trainer

LEFT_OUT = {  # the names of classes, by why they may have no example here
    "a base class": "BaseAggregator MetricInputTransformer",
    "wraps each of the others in this test": "CompositionalMetric",
    "makes an object of one of the other classes": """
        AUROC Accuracy AveragePrecision CalibrationError CohenKappa ConfusionMatrix EER ExactMatch F1Score
        FBetaScore HammingDistance HingeLoss JaccardIndex LogAUC MatthewsCorrCoef NegativePredictiveValue
        Precision PrecisionAtFixedRecall PrecisionRecallCurve ROC Recall RecallAtFixedPrecision
        SensitivityAtSpecificity Specificity SpecificityAtSensitivity StatScores
        """,
    "needs a package, or the weights of a network": """
        ARNIQA BERTScore CLIPImageQualityAssessment CLIPScore ClusterAccuracy CompleteIntersectionOverUnion
        DeepImageStructureAndTextureSimilarity DeepNoiseSuppressionMeanOpinionScore
        DistanceIntersectionOverUnion GeneralizedIntersectionOverUnion InceptionScore InfoLM
        IntersectionOverUnion KernelInceptionDistance LearnedPerceptualImagePatchSimilarity
        MeanAveragePrecision MemorizationInformedFrechetInceptionDistance NonIntrusiveSpeechQualityAssessment
        PerceptualEvaluationSpeechQuality PerceptualPathLength QualityWithNoReference ROUGEScore
        ShortTimeObjectiveIntelligibility SpatialDistortionIndex SpeechReverberationModulationEnergyRatio
        VideoMultiMethodAssessmentFusion
        """,
}
pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]  # torchmetrics warns of small examples
NOT_COMPARED = {
    "BootStrapper": "draws samples: its value differs in a second process too",
    "Running": "its window is of the last steps of all ranks; see test_logged_metrics.py",
}


class Every(TrainingModule):
    """Updates metric objects with the parts whose numbers are in the batch, and logs them as numbers."""

    def __init__(self, found: dict[str, Example]) -> None:
        super().__init__()
        self.updates = {name: example.updates for name, example in found.items()}
        metrics = {name: copy.deepcopy(example.metric) for name, example in found.items()}
        self.metrics = nn.ModuleDict(metrics)
        self.digests = nn.ModuleDict(
            {name: CompositionalMetric(digest, metric, None) for name, metric in metrics.items()}
        )

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        metrics: dict[str, Any] = dict(self.metrics.items())
        for name, metric in metrics.items():
            for number in batch[0].tolist():
                for arguments, options in self.updates[name][number::PARTS]:
                    metric.update(*arguments, **options)
        self.log_dict(dict(self.digests.items()))


def values_of(module: Every, world_size: int = 1, **options: Any) -> dict[str, float]:
    """Return all values on that many ranks."""
    trainer = quiet_trainer("ddp_fork" if world_size > 1 else "single_device", world_size, **options)
    return trainer.test(module, DataLoader(TensorDataset(torch.arange(PARTS)), batch_size=1))[0]


def found_examples() -> dict[str, Example]:
    """Return an example of every class that can be compared."""
    found, missing = examples()
    known = {name for names in LEFT_OUT.values() for name in names.split()}
    assert {name: reason for name, reason in missing.items() if name not in known} == {}
    found = {name: example for name, example in found.items() if name not in NOT_COMPARED}
    assert len(found) > 150
    return found


def different(values: dict[str, float], expected: dict[str, Any]) -> dict[str, tuple[float, Any]]:
    """Return the values that are not the expected ones, with these."""
    return {
        name: (values[name], value)
        for name, value in expected.items()
        if values[name] != pytest.approx(value, rel=1e-4, abs=1e-5)
    }


def test_every_class() -> None:
    """What two ranks update, in unequal parts, has the value of one process."""
    found = found_examples()
    assert different(values_of(Every(found), 2), values_of(Every(found))) == {}


def test_every_class_after_inference_mode() -> None:
    """A metric object that was updated and reset in inference mode can be updated outside of it."""
    module = Every(found_examples())
    first = values_of(module)
    for is_inference in (False, True, False):
        assert different(values_of(module, inference_mode=is_inference), first) == {}
