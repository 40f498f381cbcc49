"""Packers: make samples of one length from documents, which are cut or kept whole, and from their other columns."""
