"""my_backend against the contract suite of attn_dispatch: every claim is true, and it is found once installed."""

import torch

from attn_dispatch import dispatch
from attn_dispatch.testing.conformance import conform


def test_every_claim_is_true():
    found = conform("my_backend")
    assert found.passed, [(line.case, line.text, line.fix) for line in found.failures]
    assert not found.unproven


def test_it_runs_when_it_is_asked_for():
    q, k = torch.randn(1, 4, 7, 16), torch.randn(1, 2, 9, 16)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    torch.testing.assert_close(dispatch.attention(q, k, k, enable_gqa=True, backend="my_backend"), want)
