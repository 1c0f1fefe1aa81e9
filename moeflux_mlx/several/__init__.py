"""Runs one model in several processes, each with its own part of the experts."""
