"""A verdict after: is what was sampled to be believed?"""

from torch_sgmcmc.judge.after.ran import Ran, Trace, ran_of, write_ran
from torch_sgmcmc.judge.after.report import Report, report
from torch_sgmcmc.judge.after.verdicts import Verdict

__all__ = ["Ran", "Report", "Trace", "Verdict", "ran_of", "report", "write_ran"]
