"""The protocol: (dataset, task, setting, label rules) → steps, label tables, and which images they use."""

from incseg.protocol.rules import RULES, LabelRules
from incseg.protocol.steps import ORDERS, SETTINGS, Protocol, Step
from incseg.protocol.tasks import TASKS

__all__ = ["ORDERS", "RULES", "SETTINGS", "TASKS", "LabelRules", "Protocol", "Step"]
