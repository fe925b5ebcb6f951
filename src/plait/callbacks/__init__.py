"""Callbacks: a user's objects that are told what a run records, and ready ones for TensorBoard, W&B, MLflow.

A callback has some of the methods of `Callback`; each gets one record of this package. It sees what happened
and cannot change it: it is given numbers and names, no model and no optimizer.
"""

from plait.callbacks.callback import Callback, CallbackError
from plait.callbacks.mlflow import MLflow
from plait.callbacks.records import (
    ChangeRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    StartRecord,
    StepRecord,
)
from plait.callbacks.tensorboard import TensorBoard
from plait.callbacks.wandb import WandB

__all__ = [
    "Callback",
    "CallbackError",
    "ChangeRecord",
    "CheckpointRecord",
    "EndRecord",
    "EvaluationRecord",
    "MLflow",
    "StartRecord",
    "StepRecord",
    "TensorBoard",
    "WandB",
]
