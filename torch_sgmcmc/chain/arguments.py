"""What arguments that samplers share are, said once.

A line of names in braces, in the docstring of a sampler, stands for these.
"""

from __future__ import annotations

import re
import textwrap

__all__ = ["documented"]

_ARGUMENTS = {
    "num_data": "N, the number of training examples, > 0. 1 means that the loss is U "
    "itself.",
    "prior_precision": "λ >= 0, precision of the Gaussian prior N(μ, 1/λ) on each "
    "parameter; 0 is a flat prior. Default: 0.",
    "prior_mean": "μ, a number, or tensors, one for each parameter and of its shape, "
    "which are copied, see :class:`Sampler`. Default: 0.",
    "temperature": "T > 0; 1 is the Bayesian posterior. Default: 1.",
    "num_chains": "K makes K independent chains at once: every parameter has a leading "
    "dimension K, as :func:`torch.func.stack_module_state` makes them, and the loss is "
    "the sum of the chains' mean losses. Chain k is the chain of a sampler with the "
    "seed ``fold_in(seed, k)``, bit for bit. Default: None, one chain.",
    "seed": "key of the noise, a 64-bit int; None draws one, see :class:`Sampler`. "
    "Default: None.",
    "capturable": "keep the step counter in device memory, so that ``step()`` can be "
    "captured in a CUDA graph after one ordinary step, see :class:`SGLD`. Default: "
    "False.",
    "nonfinite": 'what to do about gradients that are not finite: "raise", "skip" or '
    '"allow", see :class:`Sampler`, also on clipping. Default: "raise".',
    "process_group": "the ranks that sample this chain together, see "
    ":class:`Sampler`. Default: all.",
}
_NAMES = re.compile(r"^( +)(\{\w+\}(?: \{\w+\})*)$", re.MULTILINE)


def documented(docstring: str | None) -> str | None:
    """Puts the texts of arguments where a docstring names them."""
    if docstring is None:
        return None
    return _NAMES.sub(_texts, docstring)


def _texts(names: re.Match[str]) -> str:
    indent, known = names[1], re.findall(r"\w+", names[2])
    if not all(name in _ARGUMENTS for name in known):
        return names[0]  # of somebody else
    return "\n".join(
        textwrap.fill(
            f"{name}: {_ARGUMENTS[name]}",
            width=88,
            initial_indent=indent,
            subsequent_indent=indent + "    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name in known
    )
