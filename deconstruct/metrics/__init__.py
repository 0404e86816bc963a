"""What a run reports: its record (`record.py`), and its speed and progress (`clock.py`)."""

from deconstruct.metrics.clock import PEAK_FLOPS, Clock, Progress, Window
from deconstruct.metrics.record import METRICS_FILE, MetricsWriter, cut_back, read_metrics

__all__ = [
    "METRICS_FILE",
    "PEAK_FLOPS",
    "Clock",
    "MetricsWriter",
    "Progress",
    "Window",
    "cut_back",
    "read_metrics",
]
