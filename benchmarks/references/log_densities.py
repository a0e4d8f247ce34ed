"""Posteriors with references, as log densities of constrained parameters.

A posterior is a Python file, or an entry of MODELS for data of posteriordb, with

* ``parameters``: name -> (size, kind), the kind being "real", "positive" (log), "unit"
  (logit) or "ordered" (increasing; logs of the differences). Jacobians are added;
* ``data``: a dict of tensors;
* ``log_likelihood(t, data)``: [chains, N]; [chains] if the data have no rows.
  ``t["sigma"]`` is [chains, size];
* ``log_prior(t, data)``: [chains] or [chains, k], which is summed. Default: flat;
* ``rows``: names of the data that have N rows, of which minibatches take some;
* ``quantities(t, data)``: name -> [chains, size], compared with the reference.
  Default: the parameters;
* ``reference``: name -> (mean, sd), or (mean, sd, error of the mean, error of the sd).
  A quantity of size 1 has its name, others "beta[1]", "beta[2]", ...

Counts with a gamma(2, 1) prior on their mean, whose posterior is gamma(33, 11)::

    import torch

    parameters = {"rate": (1, "positive")}
    data = {"y": [3, 1, 4, 1, 5, 9, 2, 6, 0, 0]}
    rows = ("y",)
    reference = {"rate": (33 / 11, 33**0.5 / 11)}

    def log_likelihood(t, data):
        return data["y"] * t["rate"].log() - t["rate"]

    def log_prior(t, data):
        return t["rate"].log() - t["rate"]
"""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = Mapping[str, Tensor]
STORED = Path(__file__).parents[2] / "tests" / "laws" / "reference_posteriors.json"


def identity(t: Tensors, data: Tensors) -> Tensors:
    return t


def flat(t: Tensors, data: Tensors) -> Tensor:
    return torch.zeros(len(next(iter(t.values()))), dtype=torch.float64)


def positive(u: Tensor) -> tuple[Tensor, Tensor]:
    return u.exp(), u


def unit(u: Tensor) -> tuple[Tensor, Tensor]:
    return u.sigmoid(), F.logsigmoid(u) + F.logsigmoid(-u)


def ordered(u: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([u[:, :1], u[:, 1:].exp()], 1).cumsum(1), u[:, 1:]


#: Returns the constrained values, and numbers whose sum is the log of the Jacobian.
TRANSFORMS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "positive": positive,
    "unit": unit,
    "ordered": ordered,
}


@dataclass(frozen=True)
class Posterior:
    """A posterior and its reference; the fields are explained above."""

    parameters: Mapping[str, tuple[int, str]]
    data: Mapping[str, Any]
    log_likelihood: Callable[[Tensors, Any], Tensor]
    log_prior: Callable[[Tensors, Any], Tensor] = flat
    rows: tuple[str, ...] = ()
    quantities: Callable[[Tensors, Any], Tensors] = identity
    reference: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dimension(self) -> int:
        """The number of real numbers, d."""
        return sum(size for size, _ in self.parameters.values())

    @property
    def num_data(self) -> int:
        """N, or 1 without rows."""
        return len(self.data[self.rows[0]]) if self.rows else 1

    def constrain(self, theta: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Returns parameters and log Jacobians [chains, k] of numbers [chains, d]."""
        sizes = [size for size, _ in self.parameters.values()]
        named, logs = {}, [theta[:, :0]]
        parts = zip(self.parameters.items(), theta.split(sizes, 1), strict=True)
        for (name, (_, kind)), part in parts:
            named[name] = part
            if kind != "real":
                named[name], jacobian = TRANSFORMS[kind](part)
                logs.append(jacobian)
        return named, torch.cat(logs, 1)

    def losses(self, theta: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns losses [chains, rows], whose sum over all N rows is -log density."""
        t, jacobian = self.constrain(theta)
        data = self.data
        if rows is not None:
            data = {**data, **{name: data[name][rows] for name in self.rows}}
        log = self.log_likelihood(t, data).reshape(len(theta), -1)
        if not self.rows:
            log = log.sum(1, keepdim=True)
        prior = self.log_prior(t, data).reshape(len(theta), -1)
        prior = torch.cat([prior, jacobian], 1).sum(1, keepdim=True)
        return -log - prior / self.num_data

    def compared(self, theta: Tensor) -> dict[str, np.ndarray]:
        """Returns the compared numbers, each [chains]."""
        found: dict[str, np.ndarray] = {}
        for name, value in self.quantities(self.constrain(theta)[0], self.data).items():
            columns = value.reshape(len(theta), -1).numpy().T
            names = [f"{name}[{i}]" for i in range(1, len(columns) + 1)]
            is_single = len(columns) == 1 and name in self.reference
            found.update(zip([name] if is_single else names, columns, strict=True))
        return found


# ---- Models --------------------------------------------------------------------------


def normal(x: Tensor, mean: Any, sd: Any) -> Tensor:
    """Returns the log density up to a constant."""
    z = (x - mean) / sd
    return -0.5 * z * z - (sd.log() if isinstance(sd, Tensor) else math.log(sd))


def cauchy(x: Tensor, scale: float) -> Tensor:
    return -torch.log1p((x / scale) ** 2)


def gamma(x: Tensor, shape: float, rate: float) -> Tensor:
    return (shape - 1) * x.log() - rate * x


def gaussian(t: Tensors, data: Tensors) -> Tensor:
    """Likelihood of a linear regression."""
    return normal(data["y"], t["beta"] @ data["x"].T, t["sigma"])


def sigma_cauchy(t: Tensors, data: Tensors) -> Tensor:
    return cauchy(t["sigma"], 2.5)


def wide_normal(t: Tensors, data: Tensors) -> Tensor:
    return normal(torch.cat([t["beta"], t["sigma"]], 1), 0, 10)


def regression(x: Tensor, y: Tensor, **parts: Any) -> Posterior:
    sizes = {"beta": (x.shape[1], "real"), "sigma": (1, "positive")}
    return Posterior(sizes, {"x": x, "y": y}, gaussian, rows=("x", "y"), **parts)


def linear(y: Tensor, *columns: Tensor, log_prior: Any = flat) -> Posterior:
    """A regression with an intercept."""
    x = torch.stack([torch.ones_like(y), *columns], 1)
    return regression(x, y, log_prior=log_prior)


def crossed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return a, b, a * b


def standard(x: Tensor, sds: float = 1.0) -> Tensor:
    return (x - x.mean()) / (sds * x.std())


def levels(x: Tensor) -> list[Tensor]:
    """Indicators of the levels 2, 3 and 4."""
    return [(x == level).double() for level in (2, 3, 4)]


def kidiq(d: Any, *columns: Tensor) -> Posterior:
    return linear(d.kid_score, *columns, log_prior=sigma_cauchy)


def log_mesquite(d: Any, *names: str) -> Posterior:
    """Regression on logs of sizes, or of sizes made from them; the group is no size."""
    made = {
        "volume": lambda: d.diam1 * d.diam2 * d.canopy_height,
        "area": lambda: d.diam1 * d.diam2,
        "shape": lambda: d.diam1 / d.diam2,
    }
    columns = (made[name]() if name in made else vars(d)[name] for name in names)
    pairs = zip(names, columns, strict=True)
    logs = (c if name == "group" else c.log() for name, c in pairs)
    return linear(d.weight.log(), *logs)


MESQUITE = ("canopy_height", "total_height", "density", "group")


def kilpisjarvi(d: Any) -> Posterior:
    def likelihood(t: Tensors, data: Tensors) -> Tensor:
        return normal(data["y"], t["alpha"] + t["beta"] * data["x"], t["sigma"])

    def prior(t: Tensors, data: Tensors) -> Tensor:
        alpha = normal(t["alpha"], d.pmualpha, d.psalpha)
        return alpha + normal(t["beta"], d.pmubeta, d.psbeta)

    names = {"alpha": (1, "real"), "beta": (1, "real"), "sigma": (1, "positive")}
    return Posterior(names, vars(d), likelihood, prior, rows=("x", "y"))


def autoregression(d: Any) -> Posterior:
    """An observation's predictors are the last K observations."""
    k, t = int(d.K), len(d.y)
    past = torch.stack([d.y[k - lag : t - lag] for lag in range(1, k + 1)], 1)

    def likelihood(t: Tensors, data: Tensors) -> Tensor:
        return normal(data["y"], t["alpha"] + t["beta"] @ data["x"].T, t["sigma"])

    def prior(t: Tensors, data: Tensors) -> Tensor:
        slopes = normal(torch.cat([t["alpha"], t["beta"]], 1), 0, 10)
        return torch.cat([slopes, cauchy(t["sigma"], 2.5)], 1)

    names = {"alpha": (1, "real"), "beta": (k, "real"), "sigma": (1, "positive")}
    data = {"x": past, "y": d.y[k:]}
    return Posterior(names, data, likelihood, prior, rows=("x", "y"))


def recursion(u: Tensor, factor: Tensor) -> Tensor:
    """Returns h [chains, T] with h_t = u_t + factor h_(t-1), by doubling."""
    k = 1
    while k < u.shape[1]:
        u = u + factor**k * F.pad(u[:, :-k], (k, 0))
        k *= 2
    return u


def arma(d: Any) -> Posterior:
    before = F.pad(d.y[:-1], (1, 0))

    def likelihood(t: Tensors, data: Tensors) -> Tensor:
        past = torch.cat([t["mu"], before[1:].expand(len(t["mu"]), -1)], 1)
        errors = recursion(d.y - t["mu"] - t["phi"] * past, -t["theta"])
        return normal(errors, 0, t["sigma"])

    def prior(t: Tensors, data: Tensors) -> Tensor:
        slopes = normal(t["phi"], 0, 2) + normal(t["theta"], 0, 2)
        return normal(t["mu"], 0, 10) + slopes + cauchy(t["sigma"], 2.5)

    names = dict.fromkeys(("mu", "phi", "theta"), (1, "real"))
    return Posterior({**names, "sigma": (1, "positive")}, {}, likelihood, prior)


def garch(d: Any) -> Posterior:
    """beta1 is a part of 1 - alpha1."""

    def likelihood(t: Tensors, data: Tensors) -> Tensor:
        u = t["alpha0"] + t["alpha1"] * (d.y[:-1] - t["mu"]) ** 2
        first = d.sigma1.square().expand(len(u), 1)
        variances = recursion(torch.cat([first, u], 1), quantities(t, data)["beta1"])
        return normal(d.y, t["mu"], variances.sqrt())

    def quantities(t: Tensors, data: Tensors) -> Tensors:
        return {**t, "beta1": t["part"] * (1 - t["alpha1"])}

    names = {"mu": (1, "real"), "alpha0": (1, "positive")}
    names |= dict.fromkeys(("alpha1", "part"), (1, "unit"))
    jacobian = lambda t, data: torch.log1p(-t["alpha1"])  # noqa: E731
    return Posterior(names, {}, likelihood, jacobian, quantities=quantities)


def eight_schools(d: Any) -> Posterior:
    def schools(t: Tensors) -> Tensor:
        return t["mu"] + t["tau"] * t["offset"]

    def prior(t: Tensors, data: Tensors) -> Tensor:
        top = normal(t["mu"], 0, 5) + cauchy(t["tau"], 5)
        return torch.cat([normal(t["offset"], 0, 1), top], 1)

    names = {"offset": (len(d.y), "real"), "mu": (1, "real"), "tau": (1, "positive")}
    return Posterior(
        names,
        {},
        lambda t, data: normal(d.y, schools(t), d.sigma),
        prior,
        quantities=lambda t, data: {"theta": schools(t), **t},
    )


def mixture(d: Any) -> Posterior:
    """Two normal components, the lower mean first."""

    def likelihood(t: Tensors, data: Tensors) -> Tensor:
        sizes = zip(t["mu"].split(1, 1), t["sigma"].split(1, 1), strict=True)
        first, second = (normal(data["y"], mu, sigma) for mu, sigma in sizes)
        share = t["theta"]
        return torch.logaddexp(share.log() + first, torch.log1p(-share) + second)

    def prior(t: Tensors, data: Tensors) -> Tensor:
        share = 4 * (t["theta"].log() + torch.log1p(-t["theta"]))
        return torch.cat([normal(t["mu"], 0, 2), normal(t["sigma"], 0, 2), share], 1)

    names = {"mu": (2, "ordered"), "sigma": (2, "positive"), "theta": (1, "unit")}
    return Posterior(names, {"y": d.y}, likelihood, prior, rows=("y",))


def kernel(x: Tensor, t: Tensors) -> Tensor:
    distances = (x[:, None] - x) / t["rho"][..., None]
    return t["alpha"][..., None] ** 2 * (-0.5 * distances**2).exp()


def cholesky(matrix: Tensor) -> Tensor:
    """Returns NaN for matrices that are not positive definite."""
    root, info = torch.linalg.cholesky_ex(matrix)
    return torch.where(info[:, None, None] == 0, root, math.nan)


def kernel_prior(t: Tensors) -> Tensor:
    return gamma(t["rho"], 25, 4) + normal(t["alpha"], 0, 2)


def gaussian_process(d: Any) -> Posterior:
    """The noise has the variance sigma."""
    eye = torch.eye(len(d.x), dtype=torch.float64)

    def likelihood(t: Tensors, data: Tensors) -> Tensor:
        root = cholesky(kernel(d.x, t) + t["sigma"][..., None] * eye)
        white = torch.linalg.solve_triangular(root, d.y[:, None], upper=False)[..., 0]
        return normal(white, 0, 1) - root.diagonal(dim1=1, dim2=2).log()

    names = dict.fromkeys(("rho", "alpha", "sigma"), (1, "positive"))
    prior = lambda t, data: kernel_prior(t) + normal(t["sigma"], 0, 1)  # noqa: E731
    return Posterior(names, {}, likelihood, prior)


def poisson_process(d: Any) -> Posterior:
    eye = torch.eye(len(d.x), dtype=torch.float64)

    def values(t: Tensors) -> Tensor:
        root = cholesky(kernel(d.x, t) + 1e-10 * eye)
        return (root @ t["white"][..., None])[..., 0]

    def prior(t: Tensors, data: Tensors) -> Tensor:
        return torch.cat([normal(t["white"], 0, 1), kernel_prior(t)], 1)

    names = dict.fromkeys(("rho", "alpha"), (1, "positive"))
    return Posterior(
        {**names, "white": (len(d.x), "real")},
        {},
        lambda t, data: d.k * values(t) - values(t).exp(),
        prior,
        quantities=lambda t, data: {**t, "f": values(t)},
    )


#: Of posteriordb's models, from their data.
MODELS: dict[str, Callable[[Any], Posterior]] = {
    "arK": autoregression,
    "arma11": arma,
    "blr": lambda d: regression(d.X, d.y, log_prior=wide_normal),
    "earn_height": lambda d: linear(d.earn, d.height),
    "eight_schools_noncentered": eight_schools,
    "garch11": garch,
    "gp_pois_regr": poisson_process,
    "gp_regr": gaussian_process,
    "kidscore_interaction": lambda d: kidiq(d, *crossed(d.mom_hs, d.mom_iq)),
    "kidscore_interaction_c": lambda d: linear(
        d.kid_score, *crossed(d.mom_hs - d.mom_hs.mean(), d.mom_iq - d.mom_iq.mean())
    ),
    "kidscore_interaction_c2": lambda d: linear(
        d.kid_score, *crossed(d.mom_hs - 0.5, d.mom_iq - 100)
    ),
    "kidscore_interaction_z": lambda d: linear(
        d.kid_score, *crossed(standard(d.mom_hs, 2), standard(d.mom_iq, 2))
    ),
    "kidscore_mom_work": lambda d: linear(d.kid_score, *levels(d.mom_work)),
    "kidscore_momhs": lambda d: kidiq(d, d.mom_hs),
    "kidscore_momhsiq": lambda d: kidiq(d, d.mom_hs, d.mom_iq),
    "kidscore_momiq": lambda d: kidiq(d, d.mom_iq),
    "kilpisjarvi": kilpisjarvi,
    "log10earn_height": lambda d: linear(d.earn.log10(), d.height),
    "logearn_height": lambda d: linear(d.earn.log(), d.height),
    "logearn_height_male": lambda d: linear(d.earn.log(), d.height, d.male),
    "logearn_interaction": lambda d: linear(d.earn.log(), *crossed(d.height, d.male)),
    "logearn_interaction_z": lambda d: linear(
        d.earn.log(), *crossed(standard(d.height), d.male)
    ),
    "logearn_logheight_male": lambda d: linear(d.earn.log(), d.height.log(), d.male),
    "logmesquite": lambda d: log_mesquite(d, "diam1", "diam2", *MESQUITE),
    "logmesquite_logva": lambda d: log_mesquite(d, "volume", "area", "group"),
    "logmesquite_logvas": lambda d: log_mesquite(
        d, "volume", "area", "shape", *MESQUITE[1:]
    ),
    "logmesquite_logvash": lambda d: log_mesquite(
        d, "volume", "area", "shape", "total_height", "group"
    ),
    "logmesquite_logvolume": lambda d: log_mesquite(d, "volume"),
    "low_dim_gauss_mix": mixture,
    "mesquite": lambda d: linear(
        d.weight, d.diam1, d.diam2, *(vars(d)[name] for name in MESQUITE)
    ),
    "nes": lambda d: linear(
        d.partyid7, d.real_ideo, d.race_adj, *levels(d.age_discrete),
        d.educ1, d.gender, d.income,
    ),
}  # fmt: skip


# ---- Files ---------------------------------------------------------------------------


def stored(names: Sequence[str] = ()) -> dict[str, Posterior]:
    """Returns some of the stored posteriors, or all."""
    every = json.loads(STORED.read_text())["posteriors"]
    return {name: of_record(every[name]) for name in names or every}


def of_record(record: Mapping[str, Any]) -> Posterior:
    """Returns a posterior of a model's name, its data and its reference."""
    raw = {k: torch.tensor(v, dtype=torch.float64) for k, v in record["data"].items()}
    made = MODELS[record["model"]](SimpleNamespace(**raw))
    return replace(made, reference=record["reference"])


def of_file(path: Path) -> Posterior:
    """Returns the posterior that a Python file defines."""
    named = runpy.run_path(str(path))
    given = {f.name: named[f.name] for f in fields(Posterior) if f.name in named}
    arrays = {key: np.asarray(value) for key, value in given.get("data", {}).items()}
    data = {key: torch.as_tensor(array) for key, array in arrays.items()}
    doubles = {k: v.double() if v.is_floating_point() else v for k, v in data.items()}
    return Posterior(**given | {"data": doubles})


def parsed(content: bytes) -> Any:
    """Returns what a JSON file, or the one in a zip file, contains."""
    if content[:2] == b"PK":
        with zipfile.ZipFile(BytesIO(content)) as archive:
            content = archive.read(archive.namelist()[0])
    return json.loads(content)


def of_posteriordb(root: Path, name: str, draws: Path | None = None) -> dict[str, Any]:
    """Returns model, data and reference, of a checkout or of a bare repository."""

    def read(path: str) -> Any:
        path = f"posterior_database/{path}"
        if (root / "posterior_database").is_dir():
            return parsed((root / path).read_bytes())
        command = ["git", "-C", str(root), "show", f"HEAD:{path}"]
        return parsed(
            subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        )

    about = read(f"posteriors/{name}.json")
    info = read(f"data/info/{about['data_name']}.info.json")
    if draws is None:
        kept = about["reference_posterior_name"]
        chains = read(f"reference_posteriors/draws/draws/{kept}.json.zip")
    else:
        chains = parsed(draws.read_bytes())
    data = read(f"{info['data_file']}.zip")
    return {"model": about["model_name"], "data": data, "reference": summary(chains)}


def summary(chains: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Returns mean, sd and their errors, of draws that are as good as independent."""
    found = {}
    for name in chains[0]:
        draws = np.concatenate([chain[name] for chain in chains])
        mean, sd, count = draws.mean(), draws.std(ddof=1), len(draws)
        spread = ((draws - mean) ** 2).std() / (2 * sd)
        found[name] = [mean, sd, sd / count**0.5, spread / count**0.5]
    return {name: [float(f"{v:.10g}") for v in row] for name, row in found.items()}
