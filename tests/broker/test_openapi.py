"""schemathesis against a running service: no 5xx, only documented answers, nothing that the description forbids."""

from traceback import format_exception

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode, checks
from schemathesis.config import SchemathesisConfig

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.office import offers, tasks
from flmarket.broker.settings import Settings
from flmarket.broker.work.worker import Worker

checks.load_all_checks()
# Loads the rest of schemathesis while there is one thread: pytest parses its modules, and CPython 3.11 can parse in one
# thread at a time only, while threads that log an exception parse too.
schemathesis.openapi.from_dict({"openapi": "3.1.0", "info": {"title": "none", "version": "0"}, "paths": {}})
CHECKS = [
    checks.not_a_server_error,
    *(
        checks.CHECKS.get_one(name)
        for name in (
            "status_code_conformance",
            "content_type_conformance",
            "response_headers_conformance",
            "response_schema_conformance",
            "negative_data_rejection",
        )
    ),
]
# What is wrong may also be too large to be read at all.
REJECTED = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429"]
CONFIG = SchemathesisConfig.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REJECTED}}})
EXAMPLES = 8


@pytest.fixture(scope="module")
def service(tmp_path_factory, joined, order, cheap_bid, serve):
    """A market with something in it, so that reads find something."""
    generous = {"requests_per_second": 1e6, "request_burst": 10**6, "sign_ins_per_minute": 10**6}
    broker = Broker.open(
        Settings(
            database_url=f"sqlite:///{tmp_path_factory.mktemp('fuzz')}/b.db",
            run_worker=False,
            stream_seconds=0.05,
            anonymous_requests_per_second=1e6,
            anonymous_burst=10**6,
            max_active_audits=10**6,
            **generous,
        )
    )
    people = {role: joined(broker, role) for role in ("buyer", "owner", "operator")}
    task = tasks.post_task(broker, people["buyer"].party, order(rounds=1))
    offers.place_bid(broker, people["owner"].party, task.id, cheap_bid())
    Worker(broker).run_until_idle()
    app = create_app(broker=broker)
    description = schemathesis.openapi.from_dict(app.openapi(), config=CONFIG)
    with serve(app) as address:
        yield description, address, people, task.id
    broker.close()


def whose(path):
    """The role that gets furthest on a path."""
    if "/operator" in path:
        return "operator"
    return "owner" if any(part in path for part in ("/offers", "statement", "privacy", "bid-help")) else "buyer"


def probe(operation, mode, address, headers, task_id):
    """Some requests to one operation; returns how many."""
    tried = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case):
        nonlocal tried
        tried += 1
        if mode is GenerationMode.POSITIVE and "task_id" in (case.path_parameters or {}) and tried % 2:
            case.path_parameters["task_id"] = task_id
        case.call_and_validate(base_url=address, headers=headers, checks=CHECKS, timeout=300)

    run()
    return tried


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
def test_the_description_is_kept(service, mode):
    schema, address, people, task_id = service
    tried, broken = 0, []
    for result in schema.get_all_operations():
        operation = result.ok()
        try:
            tried += probe(operation, mode, address, people[whose(operation.path)].headers, task_id)
        except Unsatisfiable:
            continue  # nothing about this operation can be wrong
        except (Exception, BaseExceptionGroup) as error:
            broken.append(f"{operation.label}: {''.join(format_exception(error))}")
    assert not broken, "\n\n".join(broken)
    assert tried > 150
