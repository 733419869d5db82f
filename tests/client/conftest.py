"""The broker's test fixtures serve the client's tests too."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("broker_conftest", Path(__file__).parents[1] / "broker" / "conftest.py")
_broker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_broker)
joined, order, cheap_bid, serve = _broker.joined, _broker.order, _broker.cheap_bid, _broker.serve
