"""Each setting declares what it affects, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

from incseg.settings import changed_values, names_affecting, setting


@dataclass
class Config:
    rate: float = 0.1
    weight: float = setting(1.0, affects="later")
    threshold: float = setting(0.5, affects="inference")
    workers: int = setting(2, affects="machine")
    sizes: list[int] = field(default_factory=lambda: [1])


def test_a_field_affects_training_unless_it_says_otherwise() -> None:
    assert names_affecting(Config, "training") == {"rate", "sizes"}
    assert names_affecting(Config, "inference", "machine") == {"threshold", "workers"}


def test_only_values_that_differ_from_their_defaults_count() -> None:
    config = Config(weight=2.0, workers=7, sizes=[1])
    assert changed_values(config, "training", "later") == {"weight": 2.0}
    assert changed_values(Config(sizes=[2]), "training") == {"sizes": [2]}
    assert changed_values(Config(), "training", "later", "inference", "machine") == {}
