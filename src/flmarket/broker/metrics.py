"""Counters for Prometheus, in a registry of their own so that two services in one process do not collide."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]


class Metrics:
    """What the service counts. Labels are few and bounded: route templates, never addresses or ids."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "flmarket_http_requests_total", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self.latency = Histogram(
            "flmarket_http_seconds", "Time to answer.", ["method", "route"], registry=self.registry
        )
        self.rounds = Counter("flmarket_rounds_total", "Rounds settled.", ["outcome"], registry=self.registry)
        self.round_seconds = Histogram("flmarket_round_seconds", "Time to play a round.", registry=self.registry)
        self.paid = Counter("flmarket_paid_micros_total", "Paid to owners, in micro-units.", registry=self.registry)
        self.tasks = Gauge("flmarket_tasks", "Tasks by state.", ["state"], registry=self.registry)
        self.streams = Gauge("flmarket_event_streams", "Open event streams.", registry=self.registry)
        self.refused = Counter("flmarket_refused_total", "Requests refused.", ["reason"], registry=self.registry)

    def count_round(self, *, valid: bool, paid_micros: int) -> None:
        """A round has been settled."""
        self.rounds.labels("settled" if valid else "empty").inc()
        self.paid.inc(paid_micros)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
