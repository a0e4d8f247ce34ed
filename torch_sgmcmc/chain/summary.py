"""Which distribution a sampler samples, in words."""

from __future__ import annotations

from typing import Any

from torch_sgmcmc.chain.prior import PRIOR_MEAN
from torch_sgmcmc.chain.record import Chain

__all__ = ["target_summary"]


def target_summary(chain: Chain) -> str:
    """Data scale, prior and temperature of each group."""
    means = [_mean(chain, group) for group in chain.groups]
    away = "θ" if set(means) == {"0"} else "θ − μ"
    lines = [
        f"{chain.name} samples p(θ) ∝ exp(−U(θ)/T), "
        f"U(θ) = N · (mean loss) + Σ λ‖{away}‖²/2."
    ]
    for i, group in enumerate(chain.groups):
        n, t = group["num_data"], group["temperature"]
        precision = group["prior_precision"]
        count = sum(p.numel() for p in group["params"] if p.requires_grad)
        data = (
            "the loss is U itself (N = 1)"
            if n == 1
            else f"the loss is a mean over N = {n:,} data"
        )
        prior = (
            "flat prior (λ = 0)"
            if precision == 0
            else f"prior N({means[i]}, {1 / precision:.4g}) on each "
            f"(λ = {precision:.4g})"
        )
        if t == 1:
            heat = "T = 1: the Bayesian posterior"
        elif t == 0:
            heat = "T = 0: no noise, an optimizer and not a sampler"
        else:
            heat = f"T = {t:.4g}: {'colder' if t < 1 else 'hotter'} than the posterior"
        lines.append(f"Group {i}, {count:,} parameters: {data}; {prior}; {heat}.")
    return "\n".join(lines)


def _mean(chain: Chain, group: dict[str, Any]) -> str:
    if any(PRIOR_MEAN in chain.state.get(p, {}) for p in group["params"]):
        return "μ"
    return f"{group[PRIOR_MEAN]:.4g}"
