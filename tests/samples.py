"""What a process tells Prometheus, as a test reads it."""

from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value_of(found: Sequence[Sample], name: str, **labels: str) -> float:
    """The sum of the samples of this name that have these labels; there is at least one."""
    values = [
        sample.value for sample in found if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert values, f"no {name}{labels} among {sorted({sample.name for sample in found})}"
    return sum(values)
