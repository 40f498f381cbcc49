"""Audit: finds out which samples a run has served, from its checkpoints."""

from rescale_data.audit.audit import Audit

__all__ = ["Audit"]
