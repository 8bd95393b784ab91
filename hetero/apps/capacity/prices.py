"""Price lists: the kinds of machines that can be rented, at which price and in which number.

The catalog's dated prices are a list of their own; a user's list is a small YAML file::

    name: quote of March
    source: mail of our cloud
    start_s: 240                       # from order to first request, by default 300
    gpus:                              # devices that the catalog lacks, as in cluster files
      X1: {mem_gib: 144, mem_bw_gbs: 5200, fp16_tflops: 700}
    machines:
      - {gpu: L4, usd_per_h: 0.8, limit: 40}
      - {gpu: H100-SXM, count: 8, usd_per_h: 24, reserved_usd_per_h: 17}
      - {gpu: L40S, count: 4, usd_per_h: 4.4, spot_usd_per_h: 1.6, losses_per_h: 0.08}

``reserved_usd_per_h`` holds for machines kept the whole day, ``spot_usd_per_h`` for machines that
are taken away ``losses_per_h`` times per hour on average. No reserved or spot price and no loss
rate is assumed where the list states none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from hetero import catalog, files
from hetero.catalog import Gpu, Link
from hetero.cluster import Cluster, Machine
from hetero.cluster.file import GpuText
from hetero.errors import CatalogError, DataError, ParameterError, require, require_not_negative
from hetero.files import parse_yaml
from hetero.naming import Name, good, slug

_SIZES = (1, 2, 4, 8)
_START_S = 300.0
_CATALOG = "catalog, each price from the place and date that it states"

_Price = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=64)]


@dataclass(frozen=True, slots=True)
class Offer:
    """A kind of machine that can be rented.

    Attributes
    ----------
    usd_per_h
        Price by the hour [$/h] of the whole machine.
    limit
        Largest number of them; None where there are always more.
    reserved_usd_per_h
        Price per hour of a machine that is kept the whole day [$/h]; None where there is none.
    spot_usd_per_h, losses_per_h
        Price of a machine that may be taken away [$/h], and how often it is per hour.
    network_s
        Way of a request from the coordinator to one of them [s].
    owned
        Their names, where they are machines of a cluster.
    source
        Where the price comes from; empty where the list says so for all.
    """

    gpu: Gpu
    count: int
    usd_per_h: float
    limit: int | None = None
    reserved_usd_per_h: float | None = None
    spot_usd_per_h: float | None = None
    losses_per_h: float | None = None
    link: Link | None = None
    network_s: float = 0.0
    owned: tuple[str, ...] = ()
    source: str = ""

    @property
    def name(self) -> str:
        """Number and type of its GPUs."""
        return f"{self.count}x{self.gpu.name}"

    def machine(self, name: str | None = None) -> Machine:
        """One of them at its price by the hour."""
        return Machine(
            name or self.name, self.gpu, self.count, usd_per_h=self.usd_per_h, link=self.link
        )


@dataclass(frozen=True)
class PriceList:
    """What can be rented.

    Attributes
    ----------
    most_gpus
        Largest number of GPUs of a type over all machines.
    start_s
        From ordering a machine to its first request [s].
    """

    name: str
    offers: tuple[Offer, ...]
    source: str = ""
    start_s: float = _START_S
    most_gpus: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        require(
            bool(self.offers),
            f"The price list {self.name} offers no machine.",
            resolve="list at least one.",
        )
        require(
            0 <= self.start_s < 3600,
            f"A machine that starts in {self.start_s:g} s cannot be rented by the hour.",
            resolve="give start_s of 0 or more and below 3600.",
        )

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> PriceList:
        """The machines of a cluster at their prices, as many as there are.

        Examples
        --------
        >>> from hetero.cluster import cluster
        >>> listed = PriceList.of_cluster(cluster("thunderserve-cloud-32"))
        >>> [(offer.name, offer.limit) for offer in listed.offers][:2]
        [('4xRTX-A6000', 2), ('4xRTX-A5000', 2)]
        """
        alike: dict[tuple[object, ...], Offer] = {}
        for one in cluster.machines:
            if one.usd_per_h is None:
                raise ParameterError(
                    f"Machine {one.name} of {cluster.name} has no price.",
                    resolve="give its usd_per_h in the cluster file.",
                )
            way_s = cluster.reach_s(one.name)
            key = (one.gpu, one.count, one.usd_per_h, one.link, way_s)
            listed = one.usd_per_h == one.count * (one.gpu.usd_per_h or 0.0)
            source = one.gpu.price_source if listed else ""
            first = Offer(
                one.gpu, one.count, one.usd_per_h, link=one.link, network_s=way_s, source=source
            )
            owned = (*alike.get(key, first).owned, one.name)
            alike[key] = replace(first, owned=owned, limit=len(owned))
        return cls(cluster.name, tuple(alike.values()), f"cluster {cluster.name}", start_s=0.0)

    @classmethod
    def joined(cls, lists: Sequence[PriceList]) -> PriceList:
        """All that several lists offer; what is ordered starts as late as on the slowest."""
        if len(lists) == 1:
            return lists[0]
        offers = (replace(o, source=one.price_source(o)) for one in lists for o in one.offers)
        return cls(
            " + ".join(one.name for one in lists),
            tuple(offers),
            start_s=max((one.start_s for one in lists), default=0.0),
            most_gpus=tuple(limit for one in lists for limit in one.most_gpus),
        )

    def only(self, gpus: Iterable[str]) -> PriceList:
        """The same list with some GPU types alone."""
        names = {self._known(name, "offers no {}.") for name in gpus}
        return replace(self, offers=tuple(o for o in self.offers if o.gpu.name in names))

    def _known(self, name: str, said: str) -> str:
        """The full name of a GPU type of the list."""
        known = {offer.gpu.name for offer in self.offers}
        full = name if name in known else catalog.gpu(name).name
        require(
            full in known,
            f"{self.name} {said.format(full)}",
            resolve=f"use {', '.join(sorted(known))}.",
        )
        return full

    def limited(self, most_gpus: Mapping[str, int]) -> PriceList:
        """The same list with at most so many GPUs of some types; 0 leaves a type out."""
        said = "cannot be limited in GPUs of {}."
        more = {self._known(name, said): most for name, most in most_gpus.items()}
        require_not_negative(**{f"limit of {name}": most for name, most in more.items()})
        limits = dict(self.most_gpus) | more
        kept = tuple(offer for offer in self.offers if limits.get(offer.gpu.name, 1) > 0)
        return replace(self, offers=kept, most_gpus=tuple(sorted(limits.items())))

    def price_source(self, offer: Offer) -> str:
        """Where the price of a machine comes from."""
        return offer.source or (
            offer.gpu.price_source if self.source == _CATALOG else self.source or self.name
        )


def from_catalog(gpus: Iterable[str] | None = None, *, sizes: Sequence[int] = _SIZES) -> PriceList:
    """The dated prices of the catalog, for machines of several sizes at the price of their GPUs.

    Parameters
    ----------
    gpus
        GPU types; by default all that have a price.

    Examples
    --------
    >>> [offer.name for offer in from_catalog(["L4"]).offers]
    ['1xL4', '2xL4', '4xL4', '8xL4']
    """
    priced = (one.name for one in catalog.gpus() if one.usd_per_h is not None)
    offers = []
    for gpu in map(catalog.gpu, priced if gpus is None else gpus):
        if gpu.usd_per_h is None:
            raise ParameterError(
                f"The catalog has no price of {gpu.name}.",
                resolve="give a price list with its usd_per_h.",
            )
        offers += [Offer(gpu, count, count * gpu.usd_per_h) for count in sizes]
    return PriceList("catalog", tuple(offers), _CATALOG)


class _OfferText(BaseModel, extra="forbid", strict=True, frozen=True):
    gpu: Name
    count: _Count = 1
    usd_per_h: _Price
    limit: Annotated[int, Field(ge=0, le=100_000)] | None = None
    reserved_usd_per_h: _Price | None = None
    spot_usd_per_h: _Price | None = None
    losses_per_h: _Price | None = None
    link: Name | None = None


class _ListText(BaseModel, extra="forbid", strict=True, frozen=True):
    name: Name | None = None
    source: str = ""
    start_s: Annotated[float, Field(ge=0, lt=3600)] = _START_S
    gpus: dict[Name, GpuText] = {}
    machines: Annotated[list[_OfferText], Field(min_length=1)]


def load(path: Path | str) -> PriceList:
    """Price list of a YAML file, see the module for its form.

    Raises
    ------
    DataError
        If the file is missing, is no YAML, or states something unknown or impossible.
    """
    path = Path(path)
    try:
        text = _ListText.model_validate(parse_yaml(files.text(path), path))
    except FileNotFoundError:
        raise DataError("There is no such file.", path=path, resolve="give a price list.") from None
    except (OSError, UnicodeDecodeError):
        raise DataError("This is no text file.", path=path, resolve="save it as UTF-8.") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(key) for key in first["loc"]) or "the file"
        said = first["msg"].removeprefix("Value error, ").partition(" or instance of")[0]
        raise DataError(
            f"{place}: {said[0].lower()}{said[1:]}.",
            path=path,
            resolve="see the example in `hetero size --help`.",
        ) from None
    offers = []
    for entry in text.machines:
        if (entry.spot_usd_per_h is None) != (entry.losses_per_h is None):
            raise DataError(
                f"Machines of {entry.gpu} have a spot price without a loss rate, or the reverse.",
                path=path,
                resolve="give spot_usd_per_h and losses_per_h together.",
            )
        own = text.gpus.get(entry.gpu)
        try:
            gpu = own.gpu(entry.gpu) if own is not None else catalog.gpu(entry.gpu)
            link = catalog.link(entry.link) if entry.link else None
        except CatalogError as error:
            raise DataError(
                f"machine of {entry.gpu}: {error.what}", path=path, resolve=error.resolve
            ) from None
        offers.append(Offer(gpu=gpu, link=link, **entry.model_dump(exclude={"gpu", "link"})))
    name = text.name or (path.stem if good(path.stem) else slug(path.stem))
    return PriceList(name, tuple(offers), text.source or path.name, text.start_s)
