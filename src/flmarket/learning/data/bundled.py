"""The two real data sets that come inside scikit-learn's wheel: nothing to download, so the demo uses them.

Breast Cancer Wisconsin (Diagnostic): 569 records, 30 features, standardised. Digits: 1,797 images of 8 by 8
pixels with values 0 to 16, scaled to [0, 1]. Both are split 70/30 by class with a fixed seed, since neither
has a split of its own.
"""

from __future__ import annotations

import numpy as np

from flmarket.errors import MissingDependency
from flmarket.learning.data.base import DataSet, standardised, stratified_split
from flmarket.learning.data.files import Locator

__all__ = ["breast_cancer", "digits"]

SPLIT_SEED = 20_220
TEST_SHARE = 0.3


def breast_cancer(locator: Locator) -> DataSet:
    """Malignant or benign from 30 measurements of cell nuclei."""
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError:
        raise MissingDependency("scikit-learn", "app") from None
    x, y = load_breast_cancer(return_X_y=True)
    train, test = stratified_split(y, test_share=TEST_SHARE, seed=SPLIT_SEED)
    x_train, x_test = standardised(x[train], x[test])
    return DataSet(
        "breast-cancer",
        x_train,
        y[train],
        x_test,
        y[test],
        classes=("malignant", "benign"),
        source="Wolberg, Mangasarian, Street 1995, UCI data set 17, as bundled with scikit-learn",
        licence="CC BY 4.0",
    )


def digits(locator: Locator) -> DataSet:
    """Ten handwritten digits of 8 by 8 pixels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingDependency("scikit-learn", "app") from None
    x, y = load_digits(return_X_y=True)
    train, test = stratified_split(y, test_share=TEST_SHARE, seed=SPLIT_SEED)
    return DataSet(
        "digits",
        x[train] / 16.0,
        y[train].astype(np.int64),
        x[test] / 16.0,
        y[test].astype(np.int64),
        classes=tuple("0123456789"),
        source="Alpaydin, Kaynak 1998, UCI data set 80 (test part), as bundled with scikit-learn",
        licence="CC BY 4.0",
    )
