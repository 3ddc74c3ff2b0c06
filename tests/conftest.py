"""What every test file shares: one hypothesis profile. No deadline, since the machine is shared; the same examples
every time, so that a failure on one machine is a failure on all."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "attn_dispatch", deadline=None, max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("attn_dispatch")
