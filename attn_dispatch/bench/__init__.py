"""Benchmarks that print ratios: ours against what a user would write with torch alone, interleaved in one run."""
