"""Joint training: all classes in one step with softmax cross-entropy. The ceiling of what steps can reach.

`--method evidential --setting joint` is the same ceiling for the evidential model.
"""

from __future__ import annotations

from incseg.methods.base import Method


class Joint(Method):
    single_step = True
