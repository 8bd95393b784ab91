from __future__ import annotations

import configparser
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hetero import paths
from hetero.catalog import gpu, link
from hetero.cluster import Cluster, Machine, Network, cluster, clusters, find
from hetero.errors import CatalogError
from hetero.workload import datasets

# GPUs of each cluster as the papers state them.
FLEETS = {
    "xiong-8xv100": {"V100-SXM2-32GB": 8},
    "xiong-v100-a800": {"V100-SXM2-32GB": 8, "A800-PCIE-80GB": 1},
    "heteroserve-4": {"H100-SXM": 1, "A100-SXM-80GB": 2, "L40S": 1},
    "heteroserve-8": {"H100-SXM": 2, "A100-SXM-80GB": 4, "L40S": 2},
    "heteroserve-16": {"H100-SXM": 4, "A100-SXM-80GB": 8, "L40S": 4},
    "heteroserve-32": {"H100-SXM": 8, "A100-SXM-80GB": 16, "L40S": 8},
    "rignall-budget-a": {"H200-SXM": 64, "H800-SXM": 64, "H20": 128},
    "rignall-budget-b": {"H200-SXM": 32, "H800-SXM": 128, "H20": 128},
    "rignall-budget-c": {"H200-SXM": 128},
    "rignall-islands-a": {"B300-SXM": 256},
    "rignall-islands-b": {"B300-SXM": 256},
    "rignall-islands-c": {"B300-SXM": 64, "Rubin-NVL144": 64, "H800-SXM": 64, "H20": 64},
    "rignall-islands-d": {"B300-SXM": 64, "Rubin-NVL144": 64, "H200-SXM": 64, "H20": 64},
    "rignall-outer-loop": {"B300-SXM": 128, "H200-SXM": 256},
    "helix-single-24": {"A100-SXM-40GB": 4, "L4": 8, "T4": 12},
    "helix-geo-24": {"A100-SXM-40GB": 4, "L4": 8, "T4": 12},
    "helix-42": {"A100-SXM-40GB": 4, "V100-16GB": 6, "L4": 16, "T4": 38},
    "helix-10": {"L4": 4, "T4": 6},
    "thunderserve-cloud-32": {"RTX-A6000": 8, "RTX-A5000": 8, "A40": 8, "RTX-3090Ti": 8},
    "thunderserve-cloud-32-unequal": {"RTX-A6000": 8, "RTX-A5000": 8, "A40": 8, "RTX-3090Ti": 8},
    "thunderserve-a100-8": {"A100-SXM-80GB": 8},
    "thunderserve-a5000-8": {"RTX-A5000": 8},
    "thunderserve-a5000-12": {"RTX-A5000": 12},
    "thunderserve-a5000-16": {"RTX-A5000": 16},
    "thunderserve-a5000-pair": {"RTX-A5000": 2},
    "thunderserve-a40-3090ti-40gbit": {"A40": 4, "RTX-3090Ti": 4},
    "thunderserve-a40-3090ti-5gbit": {"A40": 4, "RTX-3090Ti": 4},
}
ASSUMED = {"heteroserve-mix-h100", "heteroserve-mix-a100", "heteroserve-mix-l40s"}

# Fleets as they are rented today, with the sum of their prices [$/h].
CURRENT = {
    "current-small-12": ({"H100-SXM": 4, "L40S": 8}, 4 * 2.29 + 8 * 1.09),
    "current-mixed-32": (
        {"H200-SXM": 8, "H100-SXM": 8, "A100-SXM-80GB": 8, "L40S": 8},
        8 * (3.39 + 2.29 + 1.29 + 1.09),
    ),
    "current-blackwell-24": ({"B200-SXM": 8, "H100-SXM": 8, "L40S": 8}, 8 * (4.89 + 2.29 + 1.09)),
}


def test_all_clusters_of_the_papers_are_there() -> None:
    assert set(clusters().names) == set(FLEETS) | ASSUMED | set(CURRENT)
    assert "whole network is assumed" in str(cluster("thunderserve-cloud-32-unequal"))


@pytest.mark.parametrize("name", CURRENT)
def test_current_fleets_hold_their_gpus_at_the_listed_prices(name: str) -> None:
    counts, price = CURRENT[name]
    found = cluster(name)
    assert found.gpu_counts == counts
    assert found.usd_per_h == pytest.approx(price)
    assert np.isfinite(found.bandwidth_gbs()).all()


@pytest.mark.parametrize("name", FLEETS)
def test_clusters_hold_the_gpus_of_the_paper(name: str) -> None:
    assert cluster(name).gpu_counts == FLEETS[name]


def test_files_are_called_as_their_clusters_and_cite_their_paper() -> None:
    for path in paths.data("clusters").glob("*.yaml"):
        loaded = Cluster.load(path)
        assert loaded.name == path.stem
        assert loaded.source
        assert loaded.title
    for name in ASSUMED:
        assert cluster(name).gpus == 8
        assert "assumed" in str(cluster(name))


def test_prices_of_the_papers() -> None:
    # ThunderServe prints 13.542 for the first, which its own Table 1 does not sum to.
    assert cluster("thunderserve-cloud-32").usd_per_h == pytest.approx(11.328)
    assert cluster("thunderserve-a100-8").usd_per_h == pytest.approx(14.024)
    for letter in "abc":
        assert cluster(f"rignall-budget-{letter}").usd_per_h == 512
    assert cluster("xiong-8xv100").usd_per_h is None
    assert "price unknown" in str(cluster("xiong-8xv100"))
    assert "different places and dates" in str(cluster("heteroserve-8"))


def test_presets_hold_in_the_cluster() -> None:
    v100 = cluster("xiong-8xv100").machine("v100")
    assert (v100.gpu_link.name, v100.gpu_link.bandwidth_gbs) == ("PCIe3-x16", 16)
    each = {"heteroserve-8": "A100-SXM-80GB", "rignall-budget-a": "H800-SXM"}
    speeds = [cluster(name).gpu_types[of].mem_bw_gbs for name, of in each.items()]
    assert (speeds, cluster("helix-single-24").gpu_types["L4"].fp16_tflops) == ([2000, 4000], 121)


def test_islands_have_the_sizes_of_the_paper() -> None:
    def sizes(name: str, kind: str) -> list[int]:
        machines = cluster(name).machines
        return sorted((m.count for m in machines if m.gpu.name == kind), reverse=True)

    found = [sizes(f"rignall-islands-{one}", "B300-SXM") for one in "ab"]
    assert found == [[32] * 8, [32] * 2 + [16] * 4 + [8] * 8 + [4] * 16]
    found = [sizes("rignall-islands-d", kind) for kind in ("Rubin-NVL144", "H200-SXM")]
    assert found == [[32, 16, 8, 4, 4], [8] * 4 + [4] * 8]


def test_geographic_cluster() -> None:
    geo = cluster("helix-geo-24")
    by_region = {
        region: sorted(m.gpu.name for m in geo.machines if m.region == region)
        for region in geo.regions
    }
    assert by_region == {
        "region-1": ["A100-SXM-40GB"] * 4,
        "region-2": ["L4"] * 2 + ["T4"] * 8,
        "region-3": ["L4"] * 6 + ["T4"] * 4,
    }
    bandwidth, latency = geo.bandwidth_gbs(), geo.latency_s()
    assert bandwidth.shape == latency.shape == (24, 24)
    assert np.array_equal(bandwidth, bandwidth.T)
    # 10 Gb/s and 1 ms within a region, 100 Mb/s and 50 ms between them.
    same = np.array([[a.region == b.region for b in geo.machines] for a in geo.machines])
    off = ~np.eye(24, dtype=bool)
    seen = [set(one) for one in (bandwidth[same & off], bandwidth[~same], latency[~same])]
    assert seen == [{1.25}, {0.0125}, {0.05}]
    assert np.diag(bandwidth)[0] == 300  # NVLink 3 inside an A100 machine
    assert geo.network is not None
    assert geo.network.coordinator is not None
    assert geo.network.coordinator.bandwidth_gbs == 0.0125


def test_bits_and_bytes(tmp_path: Path) -> None:
    fast, slow = (
        cluster(f"thunderserve-a40-3090ti-{g}gbit").link("a40", "3090ti") for g in (40, 5)
    )
    assert (fast.bandwidth_gbs, slow.bandwidth_gbs) == (5, 0.625)
    both = write(
        tmp_path,
        """
        machines: [{name: a, gpu: L4}, {name: b, gpu: L4}, {name: c, gpu: L4}]
        network:
          within_region: {bandwidth_gbit_s: 8, latency_ms: 2}
          pairs: [{between: [b, c], bandwidth_gbyte_s: 8, latency_ms: 0}]
        """,
    )
    assert (both.link("a", "b").bandwidth_gbs, both.link("a", "b").latency_s) == (1, 0.002)
    assert both.link("c", "b").bandwidth_gbs == 8


def test_no_stated_network_is_an_error_only_when_asked_for() -> None:
    fleet = cluster("heteroserve-8")
    assert "not stated" in str(fleet)
    with pytest.raises(CatalogError, match="states no network"):
        fleet.bandwidth_gbs()
    assert cluster("xiong-8xv100").bandwidth_gbs().tolist() == [[16]]


def write(folder: Path, text: str) -> Cluster:
    lines = text.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    path = folder / "fleet.yaml"
    path.write_text("\n".join(line[indent:] for line in lines), encoding="utf-8")
    return Cluster.load(path)


def test_a_file_with_everything(tmp_path: Path) -> None:
    fleet = write(
        tmp_path,
        """
        name: mine
        gpus:
          Chip: {mem_gib: 64, mem_bw_gbs: 1600, fp16_tflops: 300, precisions: [fp16, bf16]}
        machines:
          - {name: big, gpu: H100-SXM, count: 8, region: eu, usd_per_h: 20.5}
          - {name: small, gpu: L4, copies: 3, region: us}
          - {name: old, gpu: V100-32, count: 4, link: PCIe3-x16, region: us}
          - {name: new, gpu: Chip, count: 2, region: asia}
        network:
          within_region: {link: Ethernet-40G, latency_ms: 0.5}
          between_regions: {link: WAN-100M}
          pairs:
            - {between: [eu, us], bandwidth_gbit_s: 1, latency_ms: 90}
            - {between: [small-1, big], bandwidth_gbit_s: 2, latency_ms: 80}
          coordinator: {bandwidth_gbyte_s: 1.25, latency_ms: 1}
        """,
    )
    names = [m.name for m in fleet.machines]
    assert names == ["big", "small-1", "small-2", "small-3", "old", "new"]
    prices = [fleet.machine(name).usd_per_h for name in names[:2]]
    assert prices == [20.5, gpu("L4").usd_per_h]
    assert fleet.usd_per_h is None
    assert fleet.machine("old").gpu_link == link("PCIe3-x16")
    assert fleet.machine("new").gpu.mem_bytes == 64 * 2**30
    assert fleet.link("small-2", "old").latency_s == 0.0005
    assert fleet.link("big", "new") == link("WAN-100M")
    ends = (("small-2", "old"), ("big", "old"), ("big", "small-1"), ("big", "big"))
    assert [fleet.link(*pair).bandwidth_gbs for pair in ends] == [5, 0.125, 0.25, 450]
    told = ("small-1 ... small-3", "17 GPUs, 968 GiB, price unknown.")
    told += ("Network eu and us: 0.125 GB/s (1 Gbit/s), 90 ms.",)
    assert [one for one in told if one not in str(fleet)] == []
    assert "<table>" in fleet._repr_html_()
    assert find(tmp_path / "fleet.yaml") == find(str(tmp_path / "fleet.yaml")) == fleet
    assert find("helix-10") is cluster("helix-10")


ONE = "machines: [{name: a, gpu: L4, count: 2}]\n"
WRONG = [
    (
        "machines: [{name: a, gpu: H1000}]",
        r"machine 'a': No GPU is called 'H1000'. Resolve: use H100-SXM",
    ),
    ("machines: [{name: a, gpu: A100}]", r"'A100'. Resolve: use A100-SXM-80GB or"),
    ("preset: xiong\n" + ONE, r"preset 'xiong' is called 'L4'"),
    ("preset: helixx\n" + ONE, r"No GPU preset is called 'helixx'"),
    (
        "machines: [{name: a, gpu: L4, conut: 2}]",
        r"the field 'conut' of machine 'a' is unknown. Resolve: did you mean 'count'\?",
    ),
    ("machine: 3\n" + ONE, r"did you mean 'machines'\?"),
    (
        'machines: [{name: a, gpu: L4, count: "8"}]',
        r"'count' of machine 'a' is '8'. Resolve: give a whole number",
    ),
    ("machines: [{name: a, gpu: L4, count: 2.5}]", r"is 2.5.*whole number"),
    ("machines: [{name: a, gpu: L4, count: -1}]", r"is -1.*a number above 0\."),
    ("machines: [{name: a}]", r"the field 'gpu' of machine 'a' is missing"),
    ("name: x", r"the field 'machines' is missing"),
    ("machines: []", r"'machines' is \[\]. Resolve: give a list of 1 or more"),
    ("", r"the file is empty"),
    ("machines: [L4]", r"machine number 1 is 'L4'"),
    ("machines: [{name: a, gpu: L4}, {name: a, gpu: T4}]", r"has 2 machines called 'a'"),
    (
        ONE + "network: {within_region: {bandwidth_gbit_s: 0, latency_ms: 1}}",
        r"'bandwidth_gbit_s' of network.within_region is 0. Resolve: give a number above 0",
    ),
    (
        ONE + "network: {within_region: {link: WAN-100M, bandwidth_gbit_s: 1}}",
        r"within_region gives link and bandwidth_gbit_s. Resolve: give one of",
    ),
    (ONE + "network: {coordinator: {latency_ms: 1}}", r"gives no bandwidth"),
    (ONE + "network: {coordinator: {bandwidth_gbit_s: 1}}", r"add latency_ms"),
    (
        ONE + "network: {within_region: {link: Ethernet-10}}",
        r"network.within_region: No link is called 'Ethernet-10'.*Ethernet-10G",
    ),
    ("machines: [{name: a, gpu: L4, link: PCIe9}]", r"machine 'a': No link is called 'PCIe9'"),
    (ONE + "network: {within_region: {bandwith_gbit_s: 1}}", r"did you mean 'bandwidth_gbit_s'\?"),
    (
        "machines: [{name: first, gpu: L4}, {name: second, gpu: L4}]\n"
        "network: {within_region: {link: WAN-100M}, "
        "pairs: [{between: [first, secnd], link: WAN-100M}]}",
        r"no two regions or machines of the cluster. Resolve: use second",
    ),
    (
        "machines: [{name: a, gpu: L4}, {name: b, gpu: L4}]\nnetwork: {pairs: "
        "[{between: [a, b], link: WAN-100M}, {between: [b, a], link: WAN-100M}]}",
        r"the pair is there twice",
    ),
    (
        ONE + "network: {pairs: [{between: [a], link: WAN-100M}]}",
        r"'between' of pair number 1 is \['a'\]. Resolve: give a list of 2 or more",
    ),
    (
        ONE + "network: {pairs: [{between: [eu, us], bandwidth_gbit_s: 0, latency_ms: 9}]}",
        r"'bandwidth_gbit_s' of pair number 1 \(eu and us\) is 0. Resolve: give a number above 0",
    ),
    (
        "machines: [{name: a, gpu: L4, region: x}, {name: b, gpu: L4, region: y}]\n"
        "network: {within_region: {link: WAN-100M}}",
        r"states no link between 'a' \(x\) and 'b' \(y\)",
    ),
    ("machines: [{name: a\nname: b", r"fleet.yaml, line 2: Not valid YAML"),
    (
        "gpus: {X: {mem_gib: 24, fp16_tflops: 1}}\nmachines: [{name: a, gpu: X}]",
        r"the field 'mem_bw_gbs' of gpus.X is missing",
    ),
]


@pytest.mark.parametrize(("text", "sentence"), WRONG)
def test_wrong_files_end_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(CatalogError, match=sentence) as caught:
        write(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "fleet.yaml"))
    assert " Resolve: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_unknown_names(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "nothing.yaml", "no such file"), (tmp_path, "no text file")):
        with pytest.raises(CatalogError, match=says):
            Cluster.load(path)
    with pytest.raises(CatalogError, match=r"No cluster is called 'helix-24'.*helix-geo-24"):
        find("helix-24")
    with pytest.raises(CatalogError, match="has no machine 'z'"):
        cluster("helix-10").link("z", "l4-1")


def test_coordinator(tmp_path: Path) -> None:
    machines = "machines: [{name: a, gpu: L4, region: x}, {name: b, gpu: L4, region: y}]\n"
    network = (
        "network: {within_region: {link: Ethernet-10G}, between_regions: {link: WAN-100M}, "
        "coordinator: {%s}}"
    )
    there = write(tmp_path, machines + network % "region: y")
    assert there.coordinator_link("b") == link("Ethernet-10G")
    assert there.coordinator_link("a") == link("WAN-100M")
    same = write(tmp_path, machines + network % "link: Ethernet-5G")
    assert same.coordinator_link("a") == same.coordinator_link("b") == link("Ethernet-5G")
    assert cluster("helix-single-24").coordinator_link("t4-1").bandwidth_gbs == 1
    with pytest.raises(CatalogError, match="links the region 'z', which it does not have"):
        write(tmp_path, machines + network % "region: z")
    with pytest.raises(CatalogError, match="gives a region and a link"):
        write(tmp_path, machines + network % "region: y, link: Ethernet-5G")
    with pytest.raises(CatalogError, match="no link between its coordinator and 'h100-1'"):
        cluster("heteroserve-8").coordinator_link("h100-1")


def test_clusters_built_in_code_are_checked_too() -> None:
    one = Machine("a", gpu("L4"))
    with pytest.raises(CatalogError, match="no machine"):
        Cluster("empty", ())
    with pytest.raises(CatalogError, match="has 0 GPUs"):
        Machine("a", gpu("L4"), 0)
    with pytest.raises(CatalogError, match="links the machine 'b'"):
        Cluster("x", (one,), Network(machines={frozenset("ab"): link("WAN-100M")}))


NODES = {"A100": "A100-SXM-40GB", "V100": "V100-16GB", "L4": "L4", "T4": "T4"}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("helix-single-24", "cluster24.ini"),
        ("helix-geo-24", "3cluster24.ini"),
        ("helix-42", "cluster42.ini"),
        ("helix-10", "cluster10.ini"),
    ],
)
def test_clusters_of_helix_agree_with_its_artifact(
    name: str, file: str, need: Callable[[str], None]
) -> None:
    """Nodes by region, and the mean of the links between each two regions."""
    need("helix_config")
    config = configparser.ConfigParser()
    config.read(datasets.path("helix_config", file), encoding="utf-8")
    ours = cluster(name)
    regions = [m.region for m in ours.machines] if name == "helix-geo-24" else ["local"] * 42
    nodes: Counter[tuple[str, str, int]] = Counter()
    links: dict[frozenset[str], list[tuple[float, float]]] = defaultdict(list)
    for section in config.sections():
        kind, *ends = section.split("-")
        if kind == "ComputeNode":
            card, _, count = config[section]["type"].partition("x")
            nodes[regions[int(ends[0])], NODES[card], int(count or 1)] += 1
        elif kind == "Link" and not {"source", "sink"} & set(ends):
            bandwidth, latency = (
                float(config[section][key].split(" * ")[0]) for key in ("bandwidth", "latency")
            )
            links[frozenset(regions[int(end)] for end in ends)].append((bandwidth, latency))
    assert nodes == Counter((m.region, m.gpu.name, m.count) for m in ours.machines)
    first = {m.region: m.name for m in reversed(ours.machines)}
    last = {m.region: m.name for m in ours.machines}
    for ends, drawn in links.items():
        link_ = ours.link(first[min(ends)], last[max(ends)])
        bandwidth_mb, latency_ms = np.mean(drawn, axis=0)  # the file's "mbps" are megabytes
        assert link_.bandwidth_gbs == pytest.approx(bandwidth_mb / 1e3, rel=0.03)
        assert link_.latency_s == pytest.approx(latency_ms / 1e3, rel=0.03)
