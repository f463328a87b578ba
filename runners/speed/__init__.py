"""Measures how fast a target and its drafts are on this machine, and writes it down as a cost profile."""
