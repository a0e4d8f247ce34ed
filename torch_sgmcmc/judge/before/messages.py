"""Texts of problems, the worst first."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["KINDS", "Problem", "problem"]


class Problem(NamedTuple):
    """A reason why the sampled distribution is not the intended one."""

    #: One of the kinds in ``Check.summary``'s order: "sum", "num_data", "hot", ...
    kind: str
    #: What it is, and what to change.
    words: str


def problem(key: str, **values: Any) -> Problem:
    """Returns a problem with its text, whose key is a kind or begins with one."""
    return Problem(key.split("/")[0], _TEXTS[key].format(**values))


_TEXTS = {
    "other model": "None of the model's parameters is the sampler's: the sampler would "
    "sample another model, or this one before it was copied or moved. Make the sampler "
    "of model.parameters(), last of all.",
    "other model/lost": "{lost} of the sampler's {count} tensors are not the model's, "
    "and have no gradient: was a layer replaced after the sampler was made? Make the "
    "sampler last of all.",
    "other model/none": "No parameter has a gradient of the loss. Make the sampler of "
    "the parameters of the model that the loss calls.",
    "frozen": "No parameter of the sampler requires a gradient: there is nothing to "
    "sample. Set requires_grad of the parameters to sample.",
    "shape": "The loss of a minibatch has shape {shape}, and {sampler} takes {what}.",
    "not finite": "The loss of a minibatch is {loss:.3g}, and {some} of {count} "
    "tensors have gradients that are not finite. Check the data and the model's start.",
    "sum": "The loss is {what} the minibatch: a minibatch of twice the size has "
    "{ratio:.3g} times its halves' gradient. Samplers take the mean, and num_data for "
    'the number of data (reduction="mean").',
    "broadcast": "Outputs of shape {outputs} are compared with targets of shape "
    "{targets}, each with all others. Give them one shape, as by y[:, None].",
    "gradient": "The gradient of {names} is not the derivative of the loss, and the "
    "sampler follows the gradient: it samples another distribution, or none. Remove "
    "what alters gradients: Embedding(scale_grad_by_freq=True), hooks that clip or "
    "mask, gradient reversal, straight-through estimators, detach().",
    "gradient/written": "The model writes into its weights ({names}) when it is "
    "called, like Embedding(max_norm=...): draws are altered after each step, and are "
    "not the posterior's. Remove max_norm; the prior keeps weights small.",
    "no gradient": "The gradient of {names} is always 0 or missing{size}: the prior "
    "alone draws them, or nothing does. Use them in the loss and remove what cuts the "
    "gradient (padding_idx: multiply by a mask instead; detach(), no_grad(), hooks "
    "that mask, rounding), or freeze them with requires_grad_(False) first.",
    "num_data": "num_data is {number:,.10g}, {what}: the log-likelihood is "
    "{factor:.3g} times {weaker} than meant. Set num_data={data} (for a colder or "
    "hotter posterior, temperature=).",
    "num_data/targets": "The loss is a mean over the {width:.4g} targets (tokens, "
    "pixels, labels) of each datum too, and num_data is {number:,.10g}: the likelihood "
    "is raised to the power {power:.3g}. Set num_data={total}, the number of all "
    "targets, or sum over the targets of a datum.",
    "scaled loss": "The loss is {factor:.4g} times the mean {name}, and so is the "
    "log-likelihood. Return the mean loss. num_data is the number of data that it "
    "stands for, and temperature= makes a posterior colder.",
    "probabilities": "The outputs are probabilities, and {name} takes {takes}: the "
    "likelihood is nearly flat in them. Remove the model's softmax and use "
    "cross_entropy.",
    "probabilities/sigmoid": "The outputs stay in [0, 1] at all weights, like "
    "probabilities, and {name} takes logits. Remove the model's sigmoid.",
    "probabilities/logits": "nll_loss takes logarithms of probabilities, and the "
    "outputs are not normalised. Use cross_entropy.",
    "penalty": "The loss contains a penalty on weights ({names}), whose gradient is up "
    "to {ratio:.3g} times the prior's: with prior_precision there are two priors. "
    "Remove the penalty from the loss, or set prior_precision=0.",
    "random loss": "The loss of one minibatch is another each time: something in the "
    "model or the loss is random (dropout as a function, noise), and not a likelihood. "
    "Make the loss a function of weights and data.",
    "random loss/dropout": "Dropout is on ({names}): each loss is that of another "
    "random network, and not a likelihood. Call model.eval() or set p=0; the prior "
    "regularises.",
    "batch norm": "Batch norm uses the minibatch's statistics ({names}): the loss of "
    "an example depends on others, and predictions are another function's. Call eval() "
    "on these layers once they have statistics, or use group norm.",
    "minibatch": "The gradient of a minibatch is not the mean of its halves'. Either "
    "the loss is divided by the sum of weights or of tokens that are not padding "
    "(divide by the number of data), or the loss of an example depends on others, like "
    "a contrastive loss, which is not a likelihood.",
    "dependent minibatches": "SBPS needs independent minibatches, and the minibatches "
    "of an epoch depend on each other. Give the DataLoader "
    "batch_sampler=IndependentBatchSampler(num_data, batch_size).",
    "dependent minibatches/HMC": "HMC needs the potential of all data, and the loader "
    "has minibatches: its acceptance compares different potentials, and the chain "
    "samples another distribution. Use one batch of all data, or SGHMC.",
    "weighted data": "WeightedRandomSampler draws some data more often than others: "
    "the posterior is that of another data set, with repeated data (and its "
    "num_samples is not num_data). Use shuffle=True; class imbalance is part of the "
    "likelihood.",
    "data order/unseen": "The loader does not shuffle and drops the last {unseen:,} of "
    "{data:,} data: they are never seen. Set shuffle=True (then drop_last=True loses "
    "nothing), or drop_last=False.",
    "data order/sizes": "The loader does not shuffle, and its minibatches have {least} "
    "to {most} data: each minibatch counts the same, so the data in the smallest count "
    "{ratio:.3g} times as much, always. Set shuffle=True, or use minibatches of one "
    "size.",
    "data order/sorted": "The loader does not shuffle, and its data are sorted by "
    "target: minibatches in order do not represent the data, and the chain follows "
    "them. Set shuffle=True.",
    "unstable": "lr {lr:.3g} is beyond {limit:.2g}, the limit at the largest "
    "curvature, {curvature:.3g}: the chain diverges there. Begin with {begin:.1g}.",
    "hot": "Minibatches heat the chain: {words} (too hot: {mean:g} in the mean, "
    "{tensor:g} in a tensor). Heat falls with lr / (1 - momentum). Begin with lr = "
    "{lr:.1g}, or use larger minibatches.",
    "squared error": "The loss is {half}the mean squared error{over}: as a likelihood, "
    "Gaussian noise of variance {variance:.4g}. If the noise has variance σ², the loss "
    "is the sum over outputs of (y - f)² / (2 σ²), in the mean over data: "
    "sg.losses.gaussian(noise=σ).",
}
#: All kinds of problems, the worst first.
KINDS = tuple(dict.fromkeys(key.split("/")[0] for key in _TEXTS))
