"""Traces, workloads and replay."""
