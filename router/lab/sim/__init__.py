"""Simulated fleets: real placement and prefix caches under a virtual clock; a model times the steps."""
