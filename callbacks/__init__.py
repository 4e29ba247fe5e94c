"""Things that watch a run."""

from .callback import Callback
from .early_stopping import EarlyStopping
from .goodput import Goodput
from .jsonl import JSONLLogger
from .learning_rate_monitor import LearningRateMonitor
from .logger import Logger
from .loss_spike_rollback import LossSpikeRollback
from .model_checkpoint import ModelCheckpoint
from .model_summary import ModelSummary
from .prediction_writer import BasePredictionWriter, PredictionWriter, read_predictions
from .progress_bar import ProgressBar
from .step_panel import StepPanel
from .tensorboard import TensorBoardLogger

__all__ = [
    "BasePredictionWriter",
    "Callback",
    "EarlyStopping",
    "Goodput",
    "JSONLLogger",
    "LearningRateMonitor",
    "Logger",
    "LossSpikeRollback",
    "ModelCheckpoint",
    "ModelSummary",
    "PredictionWriter",
    "ProgressBar",
    "StepPanel",
    "TensorBoardLogger",
    "read_predictions",
]
