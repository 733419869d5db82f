"""The model, the data and the two loops: nothing here knows of Flower or of money."""

from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small convolutional network for digits of 8 by 8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(4)
        self.fc = nn.Linear(8 * 2 * 2, 10)

    def forward(self, x):
        """Scores of the ten digits."""
        return self.fc(torch.flatten(self.pool(F.relu(self.conv(x))), 1))


@cache
def _digits():
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return pixels, torch.tensor(digits.target), torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))


def load_data(partition_id, num_partitions, batch_size):
    """One partition's records: four fifths to train on, the rest for validation."""
    pixels, labels, order = _digits()
    own = order[297:][partition_id::num_partitions]
    split = len(own) * 4 // 5
    train, validation = (TensorDataset(pixels[part], labels[part]) for part in (own[:split], own[split:]))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(validation, batch_size=batch_size)


def load_centralized_dataset():
    """Records that no partition holds."""
    pixels, labels, order = _digits()
    return DataLoader(TensorDataset(pixels[order[:297]], labels[order[:297]]), batch_size=128)


def train(net, trainloader, epochs, lr, device):
    """Descend for some epochs; returns the mean loss."""
    net.to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader, device):
    """Loss and accuracy."""
    net.to(device)
    net.eval()
    criterion = nn.CrossEntropyLoss()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            scores = net(images.to(device))
            loss += criterion(scores, labels.to(device)).item()
            correct += (scores.argmax(1) == labels.to(device)).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
