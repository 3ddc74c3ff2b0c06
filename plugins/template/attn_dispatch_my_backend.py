"""my_backend: attention by the textbook. Replace `compile` with your kernel and the facts with what it can do."""

import torch

from attn_dispatch.plugin import AttentionOp, Backend, Capability, Causal, Executable, Raw, dense_cost, hookimpl

FEATURES = {"weight:Softmax", "mask:Full", "mask:Causal", "gqa", "lse", "grad", "grad:lse"}


class MyBackend(Backend):
    """Softmax attention, causal or not. What is not declared here is refused before `compile` is called."""

    name = "my_backend"
    tested = "cpu"
    dtypes = frozenset({"float32", "bfloat16", "float16"})
    features = frozenset(FEATURES | {"dv_differs", "scale<=0", "scattered"})
    capabilities = (Capability(frozenset({"cpu", "cuda"}), dtypes, features),)

    def compile(self, op: AttentionOp) -> Executable:  # called once an op: import your library here
        scale, causal, wants_lse = op.effective_scale, isinstance(op.mask, Causal), op.outputs.lse

        def run(q, k, v, operands):  # q [B, Hq, Sq, D], k and v [B, Hkv, Skv, D]; batch and lengths may grow
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = q.float() @ k.float().mT * scale
            if causal:  # row i sees keys 0 to i
                seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
                scores = scores.masked_fill(~seen, -torch.inf)
            out = (scores.softmax(-1) @ v.float()).to(q.dtype)
            return Raw(out, scores.logsumexp(-1)) if wants_lse else out

        return Executable(run)

    def estimate(self, op: AttentionOp):  # what it costs, for the choice before anything is measured
        return dense_cost(op, materialised=4)


@hookimpl
def attn_dispatch_backends() -> list[Backend]:
    return [MyBackend()]
