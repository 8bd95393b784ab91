"""The ledger of published claims: each value with the check that decides on it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Literal

from hetero import paths
from hetero.errors import ParameterError, require
from pipelines.studies.published import PAPERS, CsvRow, near, rows

Judgement = Literal["reproduced", "direction only", "undecided", "not reproduced"]

KINDS = ("value", "ratio", "order", "trend", "fact")
#: Which of low, high and expected each operator uses.
OPS = {
    "between": ("low", "high"),
    "ge": ("low",),
    "gt": ("low",),
    "le": ("high",),
    "lt": ("high",),
    "eq": ("low", "high"),
    "order": ("expected",),
    "none": (),
}
REQUIRES = ("", "real trace", "model weights", "unpublished data")
#: Needs that no run of this project meets: such a claim is quoted, never judged.
QUOTED = ("model weights", "unpublished data")
#: What makes a row no test of its paper, whatever was measured.
NO_TEST = (
    *("quoted", "arithmetic", "by construction", "circular", "cannot fail", "fitted"),
    *("duplicate", "loose"),
)
#: What decides on a reading, the first that does; a corrected text is quoted.
BASES = ("text", "corrected", "artifact", "numbers", "assumed")
#: Draws from which on an interval says something.
ENOUGH = 5
COLUMNS = (
    *("id", "paper", "where", "claim", "metric", "unit", "published", "kind"),
    *("op", "low", "high", "expected", "direction", "tolerance"),
    *("setting", "requires", "notebook", "reading", "basis"),
    *("not_a_test", "draws", "iterations"),
)

_ID = re.compile(rf"({'|'.join(PAPERS)})-\d+([a-z]|-[a-z]+)?")
_NOTEBOOK = re.compile(r"\d\d_[a-z_]+")
_SIDE = re.compile(r"(>=|<=|>|<)(-?\d+(?:\.\d+)?)")
_OPEN = {"gt", "lt", ">", "<"}
_SIGN = re.compile(r"(<=|>=|<|>|=)")


@dataclass(frozen=True, slots=True)
class Order:
    """A partial order of named things, closed under transitivity.

    Chains are separated by commas or semicolons; ``<=`` and ``>=`` leave a tie open, ``=`` is one.
    Names are free text without these signs.

    Parameters
    ----------
    text
        The chains, such as ``"2>4>1>8"`` or ``"a>c,a>d,b>c,b>d"``.

    Examples
    --------
    >>> Order("2>4>1>8").entails(Order("8<2, 4>=1"))
    True
    >>> Order("L=H>U").entails(Order("U<L<=H"))
    True
    >>> Order("L>H>U").entails(Order("U<L<=H"))
    False
    """

    text: str
    _above: dict[tuple[str, str], bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        above = self._direct()
        # Warshall's closure; a chain of relations is strict as soon as one of them is.
        names = sorted({name for pair in above for name in pair})
        for middle, high, low in product(names, names, names):
            if (high, middle) in above and (middle, low) in above:
                strict = above[high, middle] or above[middle, low]
                above[high, low] = above.get((high, low), False) or strict
        for name in names:
            require(
                not above.get((name, name), False),
                f"The order '{self.text}' puts {name} above itself.",
                resolve="write each thing at one place of the order.",
            )
        object.__setattr__(self, "_above", above)

    def _direct(self) -> dict[tuple[str, str], bool]:
        above: dict[tuple[str, str], bool] = {}
        for chain in re.split("[,;]", self.text):
            names = [part.strip() for part in _SIGN.split(chain)]
            require(
                len(names) > 2 and "" not in names,
                f"'{self.text}' is not an order.",
                resolve="write names with <, >, <=, >= or = between them, such as '2>4>1>8'.",
            )
            for (left, right), sign in zip(pairwise(names[::2]), names[1::2], strict=True):
                pairs = {"<": [(right, left)], ">": [(left, right)]}.get(
                    sign[0], [(left, right), (right, left)]
                )
                for pair in pairs:
                    above[pair] = above.get(pair, False) or sign in "<>"
        return above

    @property
    def names(self) -> frozenset[str]:
        """Everything that the order ranks."""
        return frozenset(name for pair in self._above for name in pair)

    def entails(self, other: Order) -> bool:
        """Whether every relation of ``other`` follows from this order."""
        return all(
            pair in self._above and (self._above[pair] or not strict)
            for pair, strict in other._above.items()
        )

    def contradicts(self, other: Order) -> bool:
        """Whether some strict relation of ``other`` is the other way round here."""
        return any(
            strict and self._above.get(pair[::-1], False) for pair, strict in other._above.items()
        )


@dataclass(frozen=True, slots=True)
class Accepted:
    """An interval of accepted numbers; either end may be open or absent."""

    low: float = -math.inf
    high: float = math.inf
    open: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value lies inside; a single point allows for rounding to 10 digits."""
        if self.low == self.high:
            return math.isclose(value, self.low, rel_tol=1e-9, abs_tol=1e-9)
        return self.low < value < self.high if self.open else self.low <= value <= self.high

    def overlaps(self, *others: Accepted) -> bool:
        """Whether some number lies inside all of them."""
        every = (self, *others)
        low, high = max(one.low for one in every), min(one.high for one in every)
        return low < high or (low == high and all(one.holds(low) for one in every))


@dataclass(frozen=True, slots=True)
class Claim:
    """One published value, what would reproduce it, and under which reading of the paper.

    Attributes
    ----------
    id
        Paper, number in the published list, and a letter where a claim has several values.
    published
        The value as printed; a number where the paper prints one.
    op, low, high, expected
        The check: ``low`` and ``high`` are numbers in ``unit``, ``expected`` is an order.
    direction
        The weaker check, such as ``">1"`` or the part of the order that matters most.
    tolerance
        The check in words.
    setting
        Hardware, model, workload and parameters of the published value.
    requires
        What a verdict needs beyond the twins: ``""``, ``"real trace"``, ``"model weights"`` or
        ``"unpublished data"``.
    reading, basis
        Which reading of the paper is taken where it is ambiguous, and what decides on it: the
        text, else the artifact, else what the paper's other numbers exclude least; one clause.
    not_a_test
        Kind and reason of a row that cannot speak for or against the paper, else empty.
    draws, iterations
        Parameters of the notebook that list the draws and say the iterations behind a value
        (``draws`` may be a number); empty where nothing is drawn or iterated.
    """

    id: str
    paper: str
    where: str
    claim: str
    metric: str
    unit: str
    published: str
    kind: str
    op: str
    low: float | None
    high: float | None
    expected: str
    direction: str
    tolerance: str
    setting: str
    requires: str
    notebook: str
    reading: str
    basis: str
    not_a_test: str
    draws: str
    iterations: str

    @property
    def accepted(self) -> str:
        """The check as a person would write it."""
        signs = {"ge": ">= ", "gt": "> ", "le": "<= ", "lt": "< ", "eq": ""}
        if self.op == "order":
            return self.expected
        if self.op == "between":
            return f"{self.low:.6g} to {self.high:.6g}"
        if self.op == "none":
            return "-"
        return f"{signs[self.op]}{self.low if self.low is not None else self.high:.10g}"

    def judge(
        self,
        value: float | str,
        interval: tuple[float, float] | None = None,
        draws: int | None = None,
    ) -> Judgement:
        """Verdict on a measured value.

        A value reproduces the claim if it passes the check and lies on the claimed side; it
        reproduces the direction only if it lies on the claimed side and fails the check. A
        tolerance can reach across the side, and there a value does not reproduce. A value over
        draws has to be told apart from the other side by them, see :meth:`doubt`.

        Parameters
        ----------
        value
            A number in ``unit``, or an order such as ``"2>4>1>8"`` that ranks at least
            everything that the claim ranks.
        interval
            95 % interval over the draws.
        draws
            How many there are; None judges the value alone.

        Examples
        --------
        >>> claim = next(c for c in ledger() if c.id == "heteroserve-5")
        >>> claim.published, claim.accepted, claim.direction
        ('2.13', '1.8475 to 2.4125', '>1')
        >>> [claim.judge(ratio) for ratio in (2.0, 1.2, 0.9)]
        ['reproduced', 'direction only', 'not reproduced']
        >>> [claim.judge(2.0, ends, 5) for ends in ((1.8, 2.2), (1.5, 2.5))]
        ['reproduced', 'undecided']
        """
        require(
            self.op != "none",
            f"Claim {self.id} has no check, because it needs {self.requires}.",
            resolve="quote what the paper prints and judge nothing.",
        )
        if self.doubt(value, interval, draws):
            return "undecided"
        measured = self._measured(value)
        passes = _meets(measured, self.check())
        side = self.side()
        leans = side is None or _meets(measured, side)
        if passes and leans:
            return "reproduced"
        return "direction only" if side is not None and leans else "not reproduced"

    def doubt(
        self, value: float | str, interval: tuple[float, float] | None, draws: int | None
    ) -> str:
        """Why draws do not decide on a value, in one clause; empty where they do.

        What passes, or has the direction, needs an interval over at least five draws that leaves
        the other side out, and does not take in all that is accepted (an order is recorded strict
        only where they tell it apart). What fails is undecided where its interval reaches what is
        accepted; over fewer than five draws, only a plain value can fail, by the same rule.
        """
        if not self.draws or draws is None:
            return ""
        fails = self.judge(value) == "not reproduced"
        if draws < ENOUGH and not (fails and self.kind in ("value", "fact")):
            return f"{draws} draw{'s' * (draws != 1)}, {ENOUGH} are needed"
        measured, check = self._measured(value), self.check()
        if isinstance(measured, Order) and isinstance(check, Order):
            tied = fails and not measured.contradicts(check)
            return "the draws do not tell apart what is ranked" if tied else ""
        if interval is None:
            return "" if fails else "no interval over the draws is recorded"
        ends = Accepted(*interval)
        bounds = [one for one in (check, self.side()) if isinstance(one, Accepted)]
        if fails:
            return "the interval reaches what is accepted" if ends.overlaps(*bounds) else ""
        if not (bounds[-1].holds(ends.low) and bounds[-1].holds(ends.high)):
            return "the interval reaches the other side"
        covers = ends.low < bounds[0].low <= bounds[0].high < ends.high
        return "the interval takes in all that is accepted" if covers else ""

    def check(self) -> Accepted | Order:
        """What a measured value has to meet to reproduce the claim."""
        if self.op == "order":
            return Order(self.expected)
        low = -math.inf if self.low is None else self.low
        return Accepted(low, math.inf if self.high is None else self.high, self.op in _OPEN)

    def side(self) -> Accepted | Order | None:
        """What suffices for the direction, None where the claim has no weaker form."""
        if not self.direction:
            return None
        if self.op == "order":
            return Order(self.direction)
        match = _SIDE.fullmatch(self.direction)
        if match is None:
            raise ParameterError(
                f"'{self.direction}' is not a direction.",
                resolve="write >, >=, < or <= and a number, such as '>1'.",
            )
        sign, number = match[1], float(match[2])
        ends = (number, math.inf) if sign[0] == ">" else (-math.inf, number)
        return Accepted(*ends, open=sign in _OPEN)

    def _measured(self, value: float | str) -> float | Order:
        if self.op == "order":
            if not isinstance(value, str):
                raise self._unfit(value, f"an order such as '{self.expected}'")
            order = Order(value)
            missing = Order(self.expected).names - order.names
            if missing:
                raise self._unfit(value, f"an order that ranks {', '.join(sorted(missing))} too")
            return order
        if isinstance(value, str | bool) or not math.isfinite(value):
            unit = f"in {self.unit}" if self.unit else "without unit"
            raise self._unfit(value, f"a finite number {unit}")
        return float(value)

    def _unfit(self, value: object, needs: str) -> ParameterError:
        return ParameterError(
            f"Claim {self.id} ({self.metric}) cannot be judged by {value!r}.",
            resolve=f"record {needs}.",
        )


def _meets(measured: float | Order, check: Accepted | Order) -> bool:
    if isinstance(check, Accepted):
        return isinstance(measured, float) and check.holds(measured)
    return isinstance(measured, Order) and measured.entails(check)


@cache
def claims_of(paper: str) -> dict[str, Claim]:
    """Rows of one paper by id, from ``data/published/claims`` with ``settings.csv``."""
    folder = paths.data("published")
    found = read(folder / "claims" / f"{paper}.csv", folder / "settings.csv")
    return {claim.id: claim for claim in found}


def ledger() -> tuple[Claim, ...]:
    """Every row of the ledger, in its order.

    Raises
    ------
    DataError
        If a row is malformed; the text names file, line and column.

    Examples
    --------
    >>> [claim.published for claim in ledger() if claim.id.startswith("helix-21")]
    ['16657', '763', '232']
    """
    return tuple(claim for paper in PAPERS for claim in claims_of(paper).values())


def read(claims: Path, settings: Path) -> tuple[Claim, ...]:
    """Rows of a ledger in any place, checked as ``ledger()`` is."""
    texts: dict[str, str] = {}
    for row in rows(settings, ("key", "text")):
        if row.required("key") in texts:
            raise row.error("This key is there twice.", "key", resolve="keep one of the two.")
        texts[row["key"]] = row.required("text")
    found: dict[str, Claim] = {}
    for row in rows(claims, COLUMNS):
        claim = _claim(row, texts)
        if claim.id in found:
            raise row.error("This id is there twice.", "id", resolve="keep one of the two.")
        found[claim.id] = claim
    return tuple(found.values())


def _claim(row: CsvRow, settings: dict[str, str]) -> Claim:
    for column in ("where", "claim", "metric", "published", "tolerance"):
        row.required(column)
    if not _ID.fullmatch(row["id"]) or not row["id"].startswith(row["paper"] + "-"):
        raise row.error(
            f"'{row['id']}' is not the id of a claim of paper '{row['paper']}'.",
            "id",
            resolve="write paper, number and at most one letter or word, such as 'helix-20a'.",
        )
    if row["setting"] not in settings:
        raise row.error(
            f"Setting '{row['setting']}' is not described.",
            "setting",
            resolve=f"use {near(row['setting'], settings)}, or add it to settings.csv.",
        )
    row.one_of("kind", KINDS)
    row.one_of("op", OPS)
    row.one_of("requires", REQUIRES)
    for column, known in (("basis", BASES), ("not_a_test", ("", *NO_TEST))):
        kind, _, clause = row[column].partition(": ")
        if (
            kind not in known
            or bool(kind) != bool(clause)
            or (kind == "corrected") > ('"' in clause)
        ):
            raise row.error(
                f"'{row[column]}' does not begin with one of {', '.join(filter(None, known))}.",
                column,
                resolve="write the kind, a colon and why in a clause, a corrected text quoted.",
            )
    quoted = row["requires"] in QUOTED
    if row["op"] == "none" and not quoted:
        raise row.error("The claim has no check.", "op", resolve="give it one.")
    if not _NOTEBOOK.fullmatch(row["notebook"]) and not (quoted and not row["notebook"]):
        raise row.error(
            f"'{row['notebook']}' is not the name of a notebook.",
            "notebook",
            resolve="write its file name without ending, such as '01_workloads'.",
        )
    for column in ("low", "high", "expected"):
        if (row[column] != "") != (column in OPS[row["op"]]):
            uses = ", ".join(OPS[row["op"]]) or "none of low, high and expected"
            raise row.error(
                f"Operator '{row['op']}' uses {uses}.", column, resolve="fill in exactly these."
            )
    claim = Claim(
        **{column: row[column] for column in COLUMNS if column not in ("low", "high", "setting")},
        low=row.number("low"),
        high=row.number("high"),
        setting=settings[row["setting"]],
    )
    _consistent(claim, row)
    return claim


def _consistent(claim: Claim, row: CsvRow) -> None:
    """Raise where a check contradicts itself or its direction."""
    column = "expected" if claim.op == "order" else "low"
    try:
        check = claim.check()
        column = "direction"
        side = claim.side()
    except ParameterError as error:
        raise row.error(error.what, column, resolve=error.resolve) from error
    if isinstance(check, Accepted):
        if check.low > check.high or (claim.op == "eq") != (check.low == check.high):
            raise row.error(
                f"Operator '{claim.op}' does not fit {check.low:g} and {check.high:g}.",
                "low",
                resolve="put the smaller bound into low, and equal ones with operator eq only.",
            )
        fits = not isinstance(side, Accepted) or side.overlaps(check)
    else:
        fits = not isinstance(side, Order) or check.entails(side)
    if not fits:
        raise row.error(
            f"No value can pass the check and have direction '{claim.direction}'.",
            "direction",
            resolve="write a check that is weaker, or leave the cell empty.",
        )
