"""A raw update that is sent does not pass the type checker: mypy itself says so, line by line."""

import re
from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")
pytest.importorskip("flwr")

ROOT = Path(__file__).parents[2]
SNIPPET = """
import numpy as np
from flwr.app import Message

from flmarket.engines.flower.messages import Delivery, reply
from flmarket.market.kind import Delivered, RawUpdate, ReleasedUpdate
from flmarket.market.owner import Guard, OwnerSide, Work
from flmarket.privacy import NoiseSource


def honest(guard: Guard, work: Work, raw: RawUpdate, to: Message) -> Message:
    released = guard.finish(work, raw)
    Delivered(released)
    return reply(Delivery(release="r", owner=1), to, released)


def leaky(work: Work, raw: RawUpdate, to: Message) -> Message:
    Delivered(raw)  # wrong
    Delivered(np.zeros(3))  # wrong
    Delivered(work.parameters)  # wrong
    reply(Delivery(release="r", owner=1), to, np.zeros(3))  # wrong
    return reply(Delivery(release="r", owner=1), to, raw)  # wrong


class NoNoise(OwnerSide):
    def privatise(self, work: Work, raw: RawUpdate, noise: NoiseSource) -> ReleasedUpdate:
        return raw  # wrong


class Noise(OwnerSide):
    def privatise(self, work: Work, raw: RawUpdate, noise: NoiseSource) -> ReleasedUpdate:
        return super().privatise(work, raw, noise)
"""


@pytest.mark.slow
def test_only_what_a_guard_has_released_can_be_sent(tmp_path):
    path = tmp_path / "snippet.py"
    path.write_text(SNIPPET)
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    told, problems, _ = api.run([*settings, "--no-error-summary", str(path)])
    assert not problems
    wrong = {number for number, line in enumerate(SNIPPET.splitlines(), 1) if line.endswith("# wrong")}
    assert {int(line) for line in re.findall(r"snippet\.py:(\d+): error", told)} == wrong, told
    assert len(wrong) == 6
