"""What `/metrics` says.  Names are vLLM's where the meaning is the same (docs/gateway.md has the table)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from attnix.syscalls.types import TiersResult, VmstatResult

_SECONDS: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)


class Metrics:
    """Counters of this gateway, and those of the daemon as they were last asked for."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        of = self._registry
        self.running = Gauge("vllm:num_requests_running", "Requests at work in this gateway", registry=of)
        self.succeeded = Counter("vllm:request_success", "Replies by reason", ["finished_reason"], registry=of)
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens taken", registry=of)
        self.generation_tokens = Counter("vllm:generation_tokens", "Tokens generated", registry=of)
        self.first_token_s = Histogram(
            "vllm:time_to_first_token_seconds", "From request to first token", buckets=_SECONDS, registry=of
        )
        self.between_tokens_s = Histogram(
            "vllm:inter_token_latency_seconds", "Between tokens of a reply", buckets=_SECONDS, registry=of
        )
        self.whole_s = Histogram(
            "vllm:e2e_request_latency_seconds", "From request to its end", buckets=_SECONDS, registry=of
        )
        self.found = Counter(
            "attnix_prompt_tokens_found", "Prompt tokens that were not computed, by tier", ["tier"], registry=of
        )
        self.answers = Counter("attnix_http_answers", "Answers by status", ["status"], registry=of)
        self.gone = Counter("attnix_clients_gone", "Clients that left before their answer", registry=of)
        self.parked = Gauge("attnix_conversations_parked", "Contexts kept between requests", ["state"], registry=of)
        self.daemon = Gauge("attnix_daemon_connected", "1: the daemon answers", registry=of)
        self._system = _System()
        of.register(self._system)

    def show(self, vmstat: VmstatResult | None, tiers: TiersResult | None) -> bytes:
        """The text of `/metrics`."""
        self._system.vmstat, self._system.tiers = vmstat, tiers
        return generate_latest(self._registry)


class _System(Collector):
    """The daemon's numbers.  All of its counters go out as they are; some have a name at vLLM."""

    def __init__(self) -> None:
        self.vmstat: VmstatResult | None = None
        self.tiers: TiersResult | None = None

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        if self.tiers is not None:
            yield from self._tiers(self.tiers)
        if self.vmstat is not None:
            counters = self.vmstat.counters
            every = CounterMetricFamily(
                "attnix_vmstat", "Counters of the kernel, as `attnix vmstat` names them", labels=["name"]
            )
            for name, value in sorted(counters.items()):
                every.add_metric([name], value)
            yield every
            if "preemptions" in counters:
                yield CounterMetricFamily(
                    "vllm:num_preemptions", "Contexts that lost their frames to another", counters["preemptions"]
                )

    def _tiers(self, tiers: TiersResult) -> Iterator[Metric]:
        frames = GaugeMetricFamily("attnix_frames", "Frames by device and use", labels=["device", "tier", "use"])
        used = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of hbm's frames that contexts map (1: all)")
        moved = CounterMetricFamily("attnix_tier_bytes", "Bytes moved", labels=["device", "direction"])
        mapped = capacity = 0
        for row in tiers.tiers:
            numbers: dict[str, Any] = {
                "free": row.free_frames,
                "cache": row.reclaimable_frames,
                "mapped": row.mapped_frames,
            }
            for use, value in numbers.items():
                frames.add_metric([row.device, row.tier, use], value)
            moved.add_metric([row.device, "read"], row.read_bytes)
            moved.add_metric([row.device, "write"], row.write_bytes)
            if row.tier == "hbm":
                mapped, capacity = mapped + row.mapped_frames, capacity + row.capacity_frames
        used.add_metric([], mapped / capacity if capacity else 0.0)
        yield from (frames, used, moved)
