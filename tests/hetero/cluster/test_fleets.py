from __future__ import annotations

import pytest

from hetero.cluster import Cluster, cluster
from hetero.cluster.fleets import counterpart, fleet, gpu_prices, priced
from hetero.errors import CatalogError, InfeasibleError, ParameterError

MIXED = ("heteroserve-8", "thunderserve-cloud-32", "helix-single-24", "current-mixed-32")


@pytest.mark.parametrize("name", MIXED)
def test_counterparts_cost_no_more_and_leave_less_than_a_machine(name: str) -> None:
    mixed = cluster(name)
    money = sum(gpu_prices(mixed)[gpu] * count for gpu, count in mixed.gpu_counts.items())
    assert money == pytest.approx(mixed.usd_per_h)
    for gpu in mixed.gpu_types:
        alike = counterpart(mixed, gpu)
        assert list(alike.gpu_counts) == [gpu]
        price = gpu_prices(mixed)[gpu]
        assert {m.count for m in alike.machines} == {alike.machines[0].count}
        assert alike.usd_per_h == pytest.approx(alike.gpus * price)
        assert alike.usd_per_h <= money * (1 + 1e-9)
        # Of what the money buys, at most 5 % of the GPUs are not bought.
        assert alike.gpus >= 0.95 * (money / price - 1)
        assert alike.preset == mixed.preset
        if mixed.network is not None:
            assert alike.network is not None
            assert alike.network.within_region == mixed.network.within_region


def test_counts_by_hand() -> None:
    # 2 x 2.29 + 4 x 1.753 + 2 x 1.09 = 13.772 $/h.
    assert fleet("heteroserve-8 as H100-SXM").gpus == 6
    assert fleet("heteroserve-8 as A100-SXM-80GB").gpus == 7
    assert fleet("heteroserve-8 as L40S").gpus == 12
    # 64.48 $/h buy 28 H100: in machines of eight only 24, of four all of them.
    h100 = fleet("current-mixed-32 as H100-SXM")
    assert (h100.gpus, h100.machines[0].count) == (28, 4)
    # 49 A100 are affordable, and six machines of eight leave only one of them unbought.
    a100 = fleet("current-mixed-32 as A100-SXM-80GB")
    assert (a100.gpus, a100.machines[0].count) == (48, 8)
    # A GPU that the cluster has not, at the catalog's price of 4.89 $/h.
    b200 = fleet("current-mixed-32 as B200-SXM")
    assert b200.gpu_counts == {"B200-SXM": 13}


def test_a_mix_stands_in_machines_like_those_of_the_cluster_and_costs_no_more() -> None:
    mix = fleet("current-small-12 as 6 H100-SXM, 3 L40S")
    assert [(m.name, m.count) for m in mix.machines] == [
        ("h100-sxm-1", 4),
        ("h100-sxm-2", 2),
        ("l40s-1", 3),
    ]
    assert mix.usd_per_h == pytest.approx(6 * 2.29 + 3 * 1.09)
    assert fleet("current-small-12 as 4 H100-SXM, 8 L40S").usd_per_h == pytest.approx(17.88)
    with pytest.raises(InfeasibleError, match=r"more than the 17\.880"):
        fleet("current-small-12 as 7 H100-SXM, 3 L40S")


def test_a_fleet_of_one_type_is_its_own_counterpart() -> None:
    alike = counterpart(cluster("thunderserve-a5000-16"), "RTX-A5000")
    assert alike.gpu_counts == {"RTX-A5000": 16}
    assert alike.usd_per_h == pytest.approx(16 * 0.223)


def test_prices_given_hold() -> None:
    eight = cluster("xiong-8xv100")
    with pytest.raises(ParameterError, match=r"V100-SXM2-32GB of xiong-8xv100 has no price"):
        counterpart(eight, "H100-SXM")
    assert counterpart(eight, "H100-SXM", usd_per_gpu_h={"V100-SXM2-32GB": 0.6}).gpus == 2
    assert priced(eight, {"V100-SXM2-32GB": 0.6}).usd_per_h == pytest.approx(4.8)
    with pytest.raises(InfeasibleError, match="buys no H100-SXM"):
        counterpart(eight, "H100-SXM", usd_per_gpu_h={"V100-SXM2-32GB": 0.1})
    with pytest.raises(CatalogError, match="No GPU"):
        fleet("heteroserve-8 as Z9000")


def test_machines_of_one_type_at_two_prices_are_refused() -> None:
    base = cluster("heteroserve-8")
    dear = priced(base, {"A100-SXM-80GB": 3.0})
    both = Cluster("both", (base.machines[2], dear.machines[3]))
    with pytest.raises(ParameterError, match=r"costs 1\.753 and 3 "):
        gpu_prices(both)


def test_a_plain_name_is_the_shipped_cluster_with_a_network() -> None:
    assert fleet("helix-single-24") is cluster("helix-single-24")
    assert fleet("xiong-8xv100") is cluster("xiong-8xv100")  # one machine needs none
    found = fleet("heteroserve-8")
    assert found.machines == cluster("heteroserve-8").machines
    assert found.link("h100-1", "l40s-2").bandwidth_gbs == 12.5
    assert "assumed" in found.notes[-1]
