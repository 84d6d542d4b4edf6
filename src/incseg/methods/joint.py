"""Joint training: all classes in one step with softmax cross-entropy. The upper bound of incremental learning.

`--method evidential --setting joint` is the same bound for the evidential model.
"""

from __future__ import annotations

from incseg.methods.base import Method


class Joint(Method):
    single_step = True
