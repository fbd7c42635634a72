"""Runs that something is wrong with, on purpose, and healthy ones: what ``roll diagnose`` is measured on."""
