"""A verdict after: is what was sampled to be believed?"""

from torch_sgmcmc.judge.after.report import Report, report
from torch_sgmcmc.judge.after.verdicts import Verdict

__all__ = ["Report", "Verdict", "report"]
