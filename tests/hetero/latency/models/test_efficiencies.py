from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hetero.catalog import gpu, gpus, link, llm
from hetero.errors import FitError, ParameterError
from hetero.latency import Measurements, for_gpu, frames
from hetero.latency.calibration import roofline_fit
from hetero.latency.models import efficiencies
from hetero.latency.models.roofline import VALUES, Efficiency
from hetero.latency.sources import measured
from pipelines.studies import roofline_calibration

TRUE = Efficiency(
    compute_efficiency=0.7, bandwidth_efficiency=0.85, kv_efficiency=0.6, attention_efficiency=0.3,
    link_efficiency=0.4, padding_tokens=40, layer_overhead_s=2e-5, step_overhead_s=1e-3,
    hop_latency_s=3e-6,
)  # fmt: skip


def made_table(name, degree, model, rng=None, **changes):
    """A table that the roofline with known efficiencies would give."""
    b, i = map(np.ravel, np.meshgrid([1, 4, 16, 64, 256.0], [128, 512, 2048, 8192.0]))
    table = Measurements(
        decode=np.repeat([False, True], len(b)),
        batch=np.tile(b, 2),
        length_tokens=np.tile(i, 2),
        seconds=np.ones(2 * len(b)),
        gpu=name,
        llm=model,
        tensor_parallel=degree,
        **({"engine": "made", "source": "made"} | changes),
    )
    seconds = roofline_fit.predict(table, TRUE)
    if rng is not None:
        seconds = seconds * np.exp(0.03 * rng.standard_normal(len(seconds)))
    return dataclasses.replace(table, seconds=seconds)


def made_tables(rng=None):
    return [
        made_table("H100-SXM", degree, model, rng)
        for model in ("Llama-3.1-8B", "Llama-3.1-70B")
        for degree in (1, 2, 8)
    ]


def test_known_efficiencies_are_recovered():
    found = roofline_calibration.calibrate(made_tables(), hold_out=False)
    # The prior pulls a little where values can stand in for one another.
    assert found.efficiency.values[:6] == pytest.approx(TRUE.values[:6], rel=0.02)
    assert found.efficiency.values[6:] == pytest.approx(TRUE.values[6:], rel=0.35)
    assert found.accuracy["prefill"].mape_percent < 0.5
    assert found.accuracy["decode"].mape_percent < 0.5
    assert found.unmeasured == ()


def test_noise_is_within_the_stated_deviation_and_held_out_error_is_that_noise():
    found = roofline_calibration.calibrate(made_tables(np.random.default_rng(2)))
    error = np.abs(np.log(found.efficiency.values / TRUE.values))
    assert (error < 3 * found.deviation + 0.02).all()
    assert set(found.held_out) == {
        (kind, phase) for kind in ("llm", "degree") for phase in ("prefill", "decode")
    }
    # Mean of |3 % normal noise| is 2.4 %.
    assert found.held_out["llm", "decode"].mape_percent < 6.0
    assert "held out" in str(found)


def test_values_without_any_measurement_are_named():
    one = [made_table("H100-SXM", 1, m) for m in ("Llama-3.1-8B", "Llama-3.1-70B")]
    found = roofline_calibration.calibrate(one, hold_out=False)
    assert set(found.unmeasured) == {"link_efficiency", "hop_latency_s"}
    layer = [dataclasses.replace(t, layers=1, seconds=t.seconds / 80) for t in one]
    assert "step_overhead_s" in roofline_calibration.calibrate(layer, hold_out=False).unmeasured


def test_generations_and_gpus_do_not_mix():
    tables = made_tables()
    with pytest.raises(FitError, match="2 engine generations"):
        roofline_calibration.calibrate(
            [*tables, made_table("H100-SXM", 1, "Llama-3.1-8B", engine="next")]
        )
    with pytest.raises(ParameterError, match=r"belong to one GPU.*A100"):
        roofline_calibration.calibrate([*tables, made_table("A100-SXM-80GB", 1, "Llama-3.1-8B")])


def test_all_reduce_of_one_hosts_topology_is_left_out():
    tables = measured.aiconfigurator()
    out = [t for t in tables if not roofline_fit.takes_part(t)]
    assert {(t.gpu, t.tensor_parallel) for t in out} == {("L40S", 4), ("L40S", 8)}
    # Its error with the values of the others shows why.
    error = roofline_calibration.accuracy(out, efficiencies.efficiency(gpu("L40S")))["prefill"]
    assert error.bias_percent < -40


# Largest mean errors [%] of prefill and decode that the committed calibrations may have; what
# they do have is in efficiencies.csv. V100, T4 and Splitwise are the hard ones.
LIMITS = {
    ("splitwise", "A100-SXM-80GB"): (16, 7),
    ("splitwise", "H100-SXM"): (15, 5),
    ("helix", "A100-SXM-40GB"): (6, 7),
    ("helix", "L4"): (4, 6),
    ("helix", "T4"): (7, 6),
    ("helix", "V100-16GB"): (7, 11),
    ("aiconfigurator", "A100-SXM-80GB"): (6, 6),
    ("aiconfigurator", "B200-SXM"): (6, 6),
    ("aiconfigurator", "H100-SXM"): (6, 6),
    ("aiconfigurator", "H200-SXM"): (6, 6),
    ("aiconfigurator", "L40S"): (6, 6),
    ("aiconfigurator", "RTX-PRO-6000-Server"): (8, 7),
    ("profiles", "RTX-3090"): (3, 2),
    ("profiles", "RTX-4090"): (6, 5),
    ("profiles", "RTX-A6000"): (3, 2),
    ("profiles", "RTX-PRO-6000-Server"): (9, 4),
}


@pytest.mark.parametrize("source", frames.SOURCES)
def test_every_measured_table_has_its_error(source, need):
    names = {
        "splitwise": "splitwise_perf_model",
        "helix": "helix_layer_latency",
        "profiles": "llmservingsim_profile",
    }
    need(names.get(source, "aiconfigurator_grid"))
    if source == "profiles":
        need("llmservingsim_profile_v0")
    frame = frames.derived_frame("efficiencies")
    frame = frame[frame["grid"] == "published"].set_index(["source", "gpu", "engine"])
    groups = roofline_calibration.by_gpu(roofline_calibration.tables(source, raw=True))
    assert set(groups) == {key[1:] for key in frame.index if key[0] == source}
    for (name, engine), tables in groups.items():
        row = frame.loc[(source, name, engine)]
        efficiency = Efficiency(**{value: float(row[value]) for value in VALUES})
        used = [t for t in tables if roofline_fit.takes_part(t)]
        accuracy = roofline_calibration.accuracy(used, efficiency)
        for phase, limit in zip(("prefill", "decode"), LIMITS[source, name], strict=True):
            assert accuracy[phase].mape_percent == pytest.approx(
                row[f"{phase}_mape_percent"], abs=0.02
            )
            assert accuracy[phase].mape_percent <= limit


def test_defaults_take_the_newest_source_of_the_chip():
    engines = tuple(f"aiconfigurator/{name}" for name in ("vllm", "sglang", "trtllm"))
    assert efficiencies.sources("A100-SXM-80GB") == (*engines, "splitwise", "helix")
    assert efficiencies.sources("V100-SXM2-32GB") == ("helix",)
    assert efficiencies.sources("RTX-A6000") == ("profiles",)
    assert efficiencies.sources("RTX-PRO-6000-Server") == (*engines, "profiles")
    assert efficiencies.sources("RTX-A5000") == ()
    assert efficiencies.efficiency(gpu("A100-SXM-80GB")).provenance == "derived"


def test_variants_and_unmeasured_gpus_are_estimated():
    variant = efficiencies.efficiency(gpu("A100-PCIE-80GB"))
    assert variant.provenance == "estimated"
    assert (
        variant.compute_efficiency
        == efficiencies.efficiency(gpu("A100-SXM-80GB")).compute_efficiency
    )
    # Another kind of link: its share comes from GPUs on PCIe.
    assert "link_efficiency" in variant.estimated
    own = efficiencies.efficiency(gpu("RTX-4090"))
    assert (own.provenance, own.compute_efficiency) == ("derived", 1.0)
    none = efficiencies.efficiency(gpu("RTX-A5000"))
    assert none.provenance == "estimated"
    assert none.estimated == VALUES
    assert none.values == pytest.approx(efficiencies.efficiency(gpu("A40"), "median").values)


def test_pcie_links_of_one_generation_lend_each_other():
    # V100 was measured alone; L4 and T4 of the same tables in twos and fours.
    frame = efficiencies.fitted_frame().set_index(["source", "gpu"])["link_efficiency"]
    lent = efficiencies.efficiency(gpu("V100-16GB"), "helix").link_efficiency
    assert lent == pytest.approx((frame["helix", "L4"] + frame["helix", "T4"]) / 2, rel=1e-3)


def test_without_access_to_each_others_memory_the_host_limits_a_link():
    # T4 and L4 reach the same bandwidth on links of 16 and 32 GB/s.
    frame = efficiencies.fitted_frame().set_index(["source", "gpu"])["link_efficiency"]
    t4, l4 = 16 * frame["helix", "T4"], 32 * frame["helix", "L4"]
    assert t4 == pytest.approx(l4, rel=0.03)
    for name in ("RTX-3090Ti", "RTX-3090", "RTX-5090"):
        found = efficiencies.efficiency(gpu(name))
        assert found.link_efficiency * gpu(name).link_gbs == pytest.approx((t4 + l4) / 2)
        assert found.hop_latency_s == link(gpu(name).link_type).latency_s
    bridged = gpu("RTX-3090").linked(link("NVLink-bridge-Ampere"))
    assert efficiencies.efficiency(bridged).link_efficiency > 0.3


def test_variants_keep_what_is_known_of_their_memory():
    own = efficiencies.efficiency(gpu("A100-SXM-40GB"))
    helix = efficiencies.efficiency(gpu("A100-SXM-40GB"), "helix")
    newest = efficiencies.efficiency(gpu("A100-SXM-80GB"))
    assert own.bandwidth_efficiency == helix.bandwidth_efficiency > newest.bandwidth_efficiency
    assert own.compute_efficiency == newest.compute_efficiency
    without = efficiencies.efficiency(gpu("A100-SXM-40GB"), without="A100-SXM-40GB")
    assert without.bandwidth_efficiency == newest.bandwidth_efficiency


def test_a_gpu_that_is_left_out_takes_its_die_then_the_others():
    h200 = efficiencies.efficiency(gpu("H200-SXM"), without="H200-SXM")
    assert h200.compute_efficiency == efficiencies.efficiency(gpu("H100-SXM")).compute_efficiency
    b200 = efficiencies.efficiency(gpu("B200-SXM"), without="B200-SXM")
    assert b200.source.startswith("medians")
    assert b200.compute_efficiency != efficiencies.efficiency(gpu("A40")).compute_efficiency


def test_amd_has_its_own_share_of_peak_compute():
    share = efficiencies.derived_frame("offline_compute").set_index("gpu")["compute_efficiency"]
    found = {name: efficiencies.efficiency(gpu(name)) for name in ("MI300X", "MI350X", "MI308X")}
    assert found["MI300X"].compute_efficiency == share["MI300X"]
    assert "offline runs of AMD" in found["MI300X"].source
    # Of its die; with less power its clock is lower.
    slower = (1000 / 2309.6 / (1400 / 2516.6)) ** (1 / 3)
    assert found["MI350X"].compute_efficiency == pytest.approx(slower * share["MI355X"])
    assert share["MI300X"] <= found["MI308X"].compute_efficiency <= share["MI325X"]
    alone = efficiencies.efficiency(gpu("MI355X"), without="MI355X")
    assert alone.compute_efficiency == pytest.approx(share[["MI300X", "MI325X"]].median())
    assert efficiencies.efficiency(gpu("Gaudi3")).compute_efficiency > 0.6


def test_every_gpu_of_the_catalog_has_a_roofline():
    for each in gpus():
        seconds = for_gpu(each, llm("Llama-3-8B"), 2).step_model().decode_seconds([1024])
        assert 1e-4 < float(seconds) < 0.2


def test_unknown_sources_are_refused_with_the_known_ones():
    with pytest.raises(ParameterError, match=r"'splitwise' for T4\. Resolve: use helix, median"):
        for_gpu(gpu("T4"), llm("Llama-3-8B"), source="splitwise")
