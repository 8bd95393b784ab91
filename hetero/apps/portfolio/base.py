"""What planners of the arena share: the question whether they can take a case, and budgets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hetero.apps.portfolio import offers
from hetero.apps.portfolio.effort import NORMAL, Effort
from hetero.errors import InfeasibleError
from hetero.planners import ground
from hetero.plans import Plan
from hetero.question import Question


@runtime_checkable
class Planner(Protocol):
    """A planner as the portfolio asks it."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    def unfit(self, question: Question) -> str | None:
        """Why it cannot take a case, in one sentence; None if it can."""
        ...

    def plan(self, question: Question) -> Plan:
        """Its best plan.

        Raises
        ------
        InfeasibleError
            If no plan of its kind serves the case; the text names what binds.
        """
        ...


@dataclass(frozen=True)
class Adapter(ABC):
    """A planner; subclasses say how one cluster, without a budget, is planned.

    Parameters
    ----------
    effort
        How much it may try.
    """

    effort: Effort = NORMAL

    @property
    @abstractmethod
    def name(self) -> str:
        """The planner as results and options call it."""

    def unfit(self, question: Question) -> str | None:
        """Why it cannot take a case, in one sentence; None if it can."""
        return ground.unfit(question)

    def plan(self, question: Question) -> Plan:
        """Its best plan; within a budget that of the best part of the offer.

        Raises
        ------
        InfeasibleError
            If it cannot take the case, or no plan of its kind serves it.
        """
        if reason := self.unfit(question):
            raise InfeasibleError(
                f"{self.name}: {reason}", resolve="ask another planner, or change the case."
            )
        return self._within_budget(ground.within_reach(question))

    def _within_budget(self, question: Question) -> Plan:
        return offers.best_of(question, self.effort.parts, self._plan)

    @abstractmethod
    def _plan(self, question: Question) -> Plan: ...
