"""The reward game's page says what each user's ρ means as (ε, δ), in total over all rounds."""

import csv
import re

import numpy as np
import pytest
from scipy.stats import norm

from flmarket.cli.markets import run_market

GAME = """
[task]
rounds = 5
[data]
name = "breast-cancer"
owners = 30
partition = "equal"
[mechanism]
auction = "stackelberg"
[stackelberg]
delta = 1e-6
reward = 3.0
"""


def test_the_page_lists_epsilon_and_delta_of_every_participant(tmp_path, capsys):
    (tmp_path / "game.toml").write_text(GAME)
    run_market(tmp_path / "game.toml", tmp_path / "out", None, None, True)
    capsys.readouterr()
    page = (tmp_path / "out" / "report.html").read_text()
    section = page[page.index('id="privacy"') : page.index('id="guarantees"')]
    assert "over all 5 rounds together" in section
    assert section.count("total, all rounds") == 3
    rows = re.findall(r'<tr><th scope="row">(\d+)</th>((?:<td>[^<]*</td>)+)</tr>', section)
    shown = {int(user): re.findall(r"<td>([^<]*)</td>", cells) for user, cells in rows}
    users = list(csv.DictReader((tmp_path / "out" / "users.csv").read_text().splitlines()))
    participants = {int(row["user"]): row for row in users if float(row["rho"]) > 0}
    assert len(participants) >= 2
    assert set(shown) == set(participants)
    for user, (rho, epsilon, delta, _, _) in shown.items():
        assert float(rho) == pytest.approx(float(participants[user]["rho"]), rel=1e-3)
        assert float(epsilon) == pytest.approx(float(participants[user]["epsilon"]), abs=1e-3)
        assert delta == "1e-06"
        # Gaussian releases that compose to ρ are one with sensitivity / σ = √(2ρ); its δ at ε is Balle and Wang's
        exact, loss = float(participants[user]["epsilon"]), np.sqrt(2 * float(participants[user]["rho"]))
        reached = norm.cdf(loss / 2 - exact / loss) - np.exp(exact) * norm.cdf(-loss / 2 - exact / loss)
        assert reached == pytest.approx(1e-6, rel=1e-2)
