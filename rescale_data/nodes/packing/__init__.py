"""Packers: make samples of one length from documents, cut or whole, with their columns alongside the tokens."""
