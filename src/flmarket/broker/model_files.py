"""A trained model as a file that others can read: NumPy's npz, or safetensors; weights and biases by name."""

from __future__ import annotations

import io
import json
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flmarket.broker.models import TaskRow
from flmarket.broker.services.views import ModelFile
from flmarket.errors import MissingDependency

__all__ = ["ModelFormat", "model_file"]

ModelFormat = Literal["npz", "safetensors"]


def model_file(task: TaskRow, parameters: NDArray[np.float64], format: ModelFormat) -> ModelFile:
    """Softmax regression: `weights` (outputs, features) and `biases` (outputs)."""
    outputs = parameters.size // (task.features + 1)
    weights = parameters[: outputs * task.features].reshape(outputs, task.features)
    arrays = {"weights": weights.copy(), "biases": parameters[outputs * task.features :].copy()}
    about = {"task": task.id, "name": task.name, "classes": json.dumps(task.classes), "rounds": str(task.rounds_done)}
    if format == "npz":
        out = io.BytesIO()
        np.savez(out, **arrays, about=np.array(json.dumps(about)))  # type: ignore[arg-type]
        return ModelFile(f"{task.id}.npz", "application/octet-stream", out.getvalue())
    try:
        from safetensors.numpy import save
    except ImportError:
        raise MissingDependency("safetensors", "app") from None
    return ModelFile(f"{task.id}.safetensors", "application/octet-stream", save(arrays, metadata=about))
