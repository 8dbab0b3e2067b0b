"""Benchmarks that anyone can run; each prints ratios measured side by side in one run."""
