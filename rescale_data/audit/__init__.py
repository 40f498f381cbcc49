"""Audit: what a run has served, found from its checkpoints."""

from rescale_data.audit.audit import Audit

__all__ = ["Audit"]
