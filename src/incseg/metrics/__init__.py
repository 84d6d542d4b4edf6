"""Counts first, figures after: every metric is a pure function of integer counts that add up."""
