"""Names of ``onecard`` that are loaded when one of them is asked for first: jobs on paper, plans, proofs, the Engine."""

from onecard.auto.apply import parallelize
from onecard.engine import Accuracy, DistModel, Engine, InputSpec, Strategy, to_static
from onecard.launch.spawning import spawn
from onecard.planning.job import JobCost, PieceCost, RankCost
from onecard.planning.plan import Plan
from onecard.planning.price import price
from onecard.planning.search.api import plan
from onecard.planning.search.plans import Choice, Plans
from onecard.planning.transformer import Transformer
from onecard.proof.api import prove
from onecard.proof.report import Divergence, Proof
from onecard.reports.experts import ExpertBalance
from onecard.reports.operators import Coverage, coverage

__all__ = [
    "Accuracy", "Choice", "Coverage", "DistModel", "Divergence", "Engine", "ExpertBalance", "InputSpec", "JobCost", "PieceCost",
    "Plan", "Plans", "Proof", "RankCost", "Strategy", "Transformer", "coverage", "parallelize", "plan", "price", "prove", "spawn",
    "to_static",
]  # fmt: skip
