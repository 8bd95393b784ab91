"""What the analytic mixture-of-experts model does oddly, one switch each."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks(Shown):
    """Quirks of the model that Rignall's scheduler was evaluated with; True keeps one.

    Attributes
    ----------
    dispatch_halved
        (a) The prefill dispatch counts half a byte per value on every GPU; mended, only where
        the GPU computes in fp4.
    h20_table_on_h200
        (b) H200 gets H20's efficiencies of small expert products, because its name begins with
        the same letters; mended, only H20 and H20-3E do.
    mixed_units
        (c) 2^20 bytes over 10^9 bytes/s count as a millisecond; mended, 10^6 bytes do.
    large_batch_dropped
        (d) A decode batch that does not fit has no result; mended, it is cut to what fits.
    expert_table_ends
        (e) More than 65,535 tokens per expert are an error; mended, the last efficiency holds.
    memory_in_millions
        (f) The memory rule takes millions of parameters for MiB, and rounded constants; mended,
        bytes counted from the shape.
    no_causal_mask
        (g) Prefill attention computes all S^2 pairs of tokens; mended, half of them.
    dense_undivided
        (h) Tensor parallelism does not divide the leading dense layers; mended, it does. Models
        without experts need it mended.
    hits_recomputed
        (i) A prefix hit saves the down-projection of keys and values only; mended, tokens that
        hit are not computed at all.
    group_batch_mixed
        (j) With tensor parallelism the decode batch b is that of a GPU in memory, experts and
        all-to-all, but that of the whole group in attention; mended, the group attends t b.
    always_four_nodes
        (k) On nodes of eight, prefill sends tokens to four nodes and decode uses the fast link
        for exactly eight GPUs, whatever the size of the island; mended, both go by its size.

    Notes
    -----
    (a) to (g) are mistakes or simplifications of the program; (h) to (k) are choices of its
    model that matter once islands of other sizes and tensor parallelism are compared.

    Examples
    --------
    >>> CORRECTED.kept, len(FAITHFUL.kept)
    ('', 11)
    >>> FAITHFUL.mend("ag").kept
    'bcdefhijk'
    """

    dispatch_halved: bool = True
    h20_table_on_h200: bool = True
    mixed_units: bool = True
    large_batch_dropped: bool = True
    expert_table_ends: bool = True
    memory_in_millions: bool = True
    no_causal_mask: bool = True
    dense_undivided: bool = True
    hits_recomputed: bool = True
    group_batch_mixed: bool = True
    always_four_nodes: bool = True

    @property
    def kept(self) -> str:
        """Letters of the quirks that are kept."""
        return "".join(letter for letter, name in LETTERS.items() if getattr(self, name))

    def mend(self, letters: str) -> Quirks:
        """The same with the quirks of these letters mended."""
        unknown = sorted(set(letters) - LETTERS.keys())
        if unknown:
            raise ParameterError(
                f"No quirk has the letter '{unknown[0]}'.", resolve=f"use {''.join(LETTERS)}."
            )
        return replace(self, **{LETTERS[letter]: False for letter in letters})

    def table(self) -> Table:
        """One row per quirk and whether it is kept."""
        columns = (
            Column("letter", of=lambda item: item[0]),
            Column("oddity", of=lambda item: item[1].replace("_", " ")),
            Column("state", of=lambda item: "kept" if getattr(self, item[1]) else "mended"),
        )
        return Table.of("Quirks", columns, LETTERS.items())


#: Name of the switch by letter.
LETTERS = {chr(ord("a") + k): field.name for k, field in enumerate(fields(Quirks))}
#: The model as its program computes it.
FAITHFUL = Quirks()
#: Every quirk mended.
CORRECTED = Quirks().mend("".join(LETTERS))
