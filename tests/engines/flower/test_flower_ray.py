"""The same market on Flower's own simulation runtime: Ray, one actor per core."""

import numpy as np
import pytest

from flmarket.engines.flower import simulate
from flmarket.ledger import SqlLedger

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_awards_and_model_as_simulated_and_a_cut_off_run_goes_on(market, tmp_path):
    """One Ray run, cut off after a round and taken up in this process: the three rounds are the simulation's."""
    spec = market(owners={"faulty": 0.2}).simulation()
    expected = spec.run()

    class CutOff(Exception):
        pass

    def stop_after_the_second(record):
        if record.index == 1:
            raise CutOff

    with SqlLedger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        # Ray's workers may take a minute to start on a busy machine: nobody is to miss the first deadline for that
        ray = {"backend": "ray", "bid_seconds": 180.0}
        with pytest.raises(CutOff):
            simulate(spec, tmp_path, ledger=ledger, progress=stop_after_the_second, **ray)
        found = simulate(spec, tmp_path, ledger=ledger)
        assert [award.price_micros for award in ledger.awards()] == [
            int(price) for r in expected.rounds for price, won in zip(r.price_micros, r.epsilon > 0, strict=True) if won
        ]
    assert [record.state for record in found.records] == [record.state for record in expected.rounds]
    assert [record.metrics for record in found.records] == [record.metrics for record in expected.rounds]
    np.testing.assert_array_equal(found.parameters, expected.parameters)
