"""What ``/metrics`` tells Prometheus. One registry per server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from wam_policy_ros.contract.interface import PolicySpec
from wam_policy_ros.contract.places import PlaceStatus
from wam_policy_ros.contract.policy_thread import Traffic
from wam_policy_ros.contract.schedule import Priority, Refusal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60)


class Metrics:
    """Counters, gauges and histograms of one server. Gauges are read when somebody asks.

    Args:
        ready, connections, sessions, waiting, places, traffic: functions that give the present value.
        more: name -> meaning and value, of what runs beside the server.
    """

    def __init__(
        self,
        *,
        ready: Callable[[], float],
        connections: Callable[[], float],
        sessions: Callable[[], float],
        waiting: Callable[[], float],
        places: Callable[[], Sequence[PlaceStatus]] = lambda: (),
        traffic: Callable[[], Traffic] = Traffic,
        more: Mapping[str, tuple[str, Callable[[], float]]] = {},
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "wam_openpi_requests", "Requests by outcome", ["dialect", "endpoint", "outcome"], registry=registry
        )
        self.infer_s = Histogram(
            "wam_openpi_infer_seconds", "The policy's own time per step", registry=registry, buckets=_SECONDS
        )
        self.queue_s = Histogram(
            "wam_openpi_queue_seconds", "Time a step waited for its turn", registry=registry, buckets=_SECONDS
        )
        self.answer_s = Histogram(
            "wam_openpi_answer_seconds", "Receipt of a request to its reply", registry=registry, buckets=_SECONDS
        )
        self.handshakes = Counter(
            "wam_openpi_refused_handshakes", "Connections refused at the upgrade", ["reason"], registry=registry
        )
        self.freed = Counter("wam_openpi_sessions_freed", "Sessions ended, by cause", ["cause"], registry=registry)
        self._policy = Info("wam_openpi_policy", "What answers, see the contract in /info", registry=registry)
        for name, text, value in (
            ("wam_openpi_ready", "1 when a request would probably succeed", ready),
            ("wam_openpi_connections", "Open connections", connections),
            ("wam_openpi_sessions", "Sessions, those that wait for their client included", sessions),
            ("wam_openpi_waiting_jobs", "Jobs in the policy's queue", waiting),
            *((name, *of) for name, of in more.items()),
        ):
            Gauge(name, text, registry=registry).set_function(value)
        registry.register(_Replicas(places))
        registry.register(_Jobs(traffic))

    def tell(self, spec: PolicySpec) -> None:
        """Whose answers these are; once the policy is loaded."""
        parts = spec.fingerprint.parts if spec.fingerprint else {}
        known = {
            "fingerprint": spec.fingerprint.id if spec.fingerprint else "",
            "weights_hash": spec.details.get("weights_hash"),
            "source": parts.get("code", {}).get("source"),
            "commit": parts.get("code", {}).get("commit"),
            "device": parts.get("device", {}).get("name"),
            "deterministic": spec.details.get("deterministic"),
        }
        self._policy.info({name: "" if value is None else str(value) for name, value in known.items()})

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _Replicas(Collector):
    """Of every place of the policy, asked when somebody looks."""

    def __init__(self, places: Callable[[], Sequence[PlaceStatus]]) -> None:
        self._places = places

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("wam_openpi_replica_up", "1 when it takes calls", labels=["replica"])
        sessions = GaugeMetricFamily(
            "wam_openpi_replica_sessions", "Sessions open there, of several", labels=["replica"]
        )
        running = GaugeMetricFamily("wam_openpi_replica_running_seconds", "Of the present call", labels=["replica"])
        calls = CounterMetricFamily("wam_openpi_replica_calls", "Calls that ended well", labels=["replica"])
        seconds = CounterMetricFamily("wam_openpi_replica_call_seconds", "Spent in them", labels=["replica"])
        restarts = CounterMetricFamily("wam_openpi_replica_restarts", "Of its process", labels=["replica"])
        capacity = GaugeMetricFamily("wam_openpi_sessions_capacity", "That memory has room for", labels=["replica"])
        held = GaugeMetricFamily(
            "wam_openpi_sessions_open", "At the policy, the robot's place included", labels=["replica"]
        )
        memory = GaugeMetricFamily(
            "wam_openpi_memory_bytes", "On the device by what it is for; host: pinned", labels=["replica", "of"]
        )
        for place in self._places():
            label = [str(place.index)]
            up.add_metric(label, float(not place.trouble))
            sessions.add_metric(label, place.sessions)
            running.add_metric(label, place.running_s)
            calls.add_metric(label, place.calls)
            seconds.add_metric(label, place.call_s)
            restarts.add_metric(label, float(place.details.get("restarts", 0)))
            if (most := place.details.get("sessions_capacity")) is not None:
                capacity.add_metric(label, most)
            if (count := place.details.get("sessions_open")) is not None:
                held.add_metric(label, count)
            for noun, nbytes in place.details.get("memory_bytes", {}).items():
                memory.add_metric([*label, noun], nbytes)
        return (up, sessions, running, calls, seconds, restarts, capacity, held, memory)


class _Jobs(Collector):
    """What became of the jobs of the policy, the robot's included."""

    def __init__(self, traffic: Callable[[], Traffic]) -> None:
        self._traffic = traffic

    def collect(self) -> Iterable[Metric]:
        interleaved = CounterMetricFamily(
            "wam_openpi_jobs_interleaved", "Jobs of the robot that ran inside a client's step, which then went on"
        )
        restarted = CounterMetricFamily(
            "wam_openpi_jobs_restarted", "Steps that the robot interrupted, so that they had to start again"
        )
        refused = CounterMetricFamily(
            "wam_openpi_jobs_refused", "Jobs that were not run, or not again", labels=["reason"]
        )
        waiting = GaugeMetricFamily("wam_openpi_jobs_waiting", "Jobs in the policy's queue", labels=["priority"])
        traffic = self._traffic()
        interleaved.add_metric([], traffic.interleaved)
        restarted.add_metric([], traffic.restarted)
        for reason in Refusal:
            refused.add_metric([reason.value], traffic.refused.get(reason, 0))
        for priority in Priority:
            waiting.add_metric([priority.name.lower()], traffic.waiting.get(priority, 0))
        return (interleaved, restarted, refused, waiting)
