"""Shared parts of the generation engines: interface, requests, sampling."""
